"""Alembic migrations: additive only, so that an older writer goes on working beside a newer one."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Engine


def upgrade(engine: Engine, revision: str | None) -> bool:
    """Bring the database from `revision` (`None`: empty) to the newest; `False` if the revision is unknown here.

    The caller holds the write lock.
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
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
    return True
