"""Alembic migrations of stores that an earlier release made. They only add, so older apps still write to the store.

Apps of an older release also open such a store, as long as the first two digits of its revision are those of their
own. A migration that does more than add, if there must ever be one, begins with other digits: `0100`.

A new table, nullable column or index takes four steps. (1) Declare it in `tables.py`. (2) Add
`versions/000N_what_it_adds.py` with `revision = "000N"`, `down_revision` of the one before and an `upgrade()` that adds
it to a store of that revision. (3) Raise `HEAD` in `tables.py`. (4) Run `tests/store/test_schema.py`: it migrates a
store that was frozen at revision 0001 and compares it with a new one. A column that is not nullable needs a
`server_default`, because older writers leave it out.
"""

from pathlib import Path

from sqlalchemy import Connection

# Where alembic finds `env.py` and `versions`.
DIRECTORY = Path(__file__).parent


def upgrade(connection: Connection, revision: str, schema: str | None = None) -> bool:
    """Migrate the database from `revision` to the newest one; return `False` if this release does not know `revision`.

    The caller holds the write lock and commits. With `schema`, only the version table in that PostgreSQL schema is
    used.
    """
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(DIRECTORY).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    if revision not in {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}:
        return False
    config.attributes["connection"] = connection
    config.attributes["schema"] = schema
    command.upgrade(config, "head")
    return True
