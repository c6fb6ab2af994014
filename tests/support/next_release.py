"""The package as the release after this one: the same code, with one migration more.

To this copy every store of today is an older one: a process that imports the copy migrates it.
"""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import art_patch
from art_patch.store import HEAD

PACKAGE = Path(art_patch.__file__).parent
NEXT = f"{int(HEAD) + 1:04}"

TABLE = """
later = Table("later", metadata, Column("id", Integer, primary_key=True))
"""

MIGRATION = f"""
import sqlalchemy as sa
from alembic import op

revision, down_revision = "{NEXT}", "{HEAD}"


def upgrade():
    op.create_table("later", sa.Column("id", sa.Integer(), nullable=False), sa.PrimaryKeyConstraint("id"))
"""


def next_release(directory: Path) -> Path:
    """Copy the package and raise its schema; return the folder that programs have to start in to import the copy."""
    copy = directory / "next_release" / "art_patch"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    tables = copy / "store" / "schema" / "tables.py"
    source = tables.read_text()
    assert f'HEAD = "{HEAD}"' in source
    tables.write_text(source.replace(f'HEAD = "{HEAD}"', f'HEAD = "{NEXT}"') + TABLE)
    (copy / "store" / "schema" / "migrations" / "versions" / f"{NEXT}_later.py").write_text(MIGRATION)
    return copy.parent


def back_to_this_release(path: Path) -> None:
    """Let this release open a store that the next one has migrated; it had nothing to change but this number."""
    with closing(sqlite3.connect(path)) as raw, raw:
        assert raw.execute("SELECT version_num FROM alembic_version").fetchall() == [(NEXT,)]
        raw.execute("UPDATE alembic_version SET version_num = ?", (HEAD,))
