"""Checks of a store on PostgreSQL: whether it can be asked, what it is, which schema its tables have."""

from __future__ import annotations

from contextlib import closing
from importlib import import_module
from typing import Any

from art_patch.doctor.finding import Finding
from art_patch.doctor.storage import schema
from art_patch.errors import ConfigError
from art_patch.store import missing_driver, postgres_parameters, without_password

_LOOK = """
    SELECT current_setting('server_version'), current_schema(), pg_size_pretty(pg_database_size(current_database())),
           ARRAY(SELECT tablename::text FROM pg_tables WHERE schemaname = current_schema())
"""


def server(url: str, head: str) -> tuple[list[Finding], float | None]:
    """Return what is found, and when the last call was recorded.

    Args:
        url: of the store.
        head: the schema of this release.
    """
    shown = without_password(url)
    try:
        parameters = {"connect_timeout": "3", "application_name": "art_patch doctor"} | postgres_parameters(url)
        psycopg: Any = import_module("psycopg")
    except ConfigError as error:
        return [Finding("store", "bad", str(error))], None
    except ImportError as error:
        return [Finding("store", "bad", missing_driver(url, error))], None
    last: float | None = None
    revision: str | None = None
    try:
        with closing(psycopg.connect(**parameters, autocommit=True)) as connection:
            version, place, size, tables = connection.execute(_LOOK).fetchone()
            if {"alembic_version", "nodes"} <= set(tables):
                revision = connection.execute("SELECT version_num FROM alembic_version").fetchone()[0]
                last = connection.execute("SELECT max(started_at) FROM calls").fetchone()[0]
    except psycopg.Error as error:
        words = " ".join(str(error).split())
        return [Finding("store", "bad", f"{shown} cannot be asked ({words})", "see that the server lets you in")], None
    text = f"{shown}, PostgreSQL {version}, schema {place}, {size}"
    return [Finding("store", "ok", text), schema(revision, bool(tables), head)], last
