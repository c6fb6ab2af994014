"""Alembic migrations: additive only, so that an older writer goes on working beside a newer one."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection


def upgrade(connection: Connection, revision: str | None, schema: str | None = None) -> bool:
    """Bring the database from `revision` (`None`: empty) to the newest; `False` if the revision is unknown here.

    The caller holds the write lock, and commits. With `schema`, only a version table in there counts: PostgreSQL finds
    one of another project, too, in a later part of its search path.
    """
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if revision is not None and revision not in known:
        return False
    config.attributes["connection"] = connection
    config.attributes["schema"] = schema
    command.upgrade(config, "head")
    return True
