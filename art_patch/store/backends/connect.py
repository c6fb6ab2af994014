"""Opening the database that a URL names."""

from __future__ import annotations

from importlib import import_module

from art_patch._lib.forking import late_import
from art_patch.errors import ConfigError
from art_patch.store.backends.database import Database, Trouble
from art_patch.store.backends.urls import is_postgres, missing_driver


def open_database(
    url: str, *, create: bool = True, project: str | None = None, trouble: Trouble | None = None
) -> Database:
    """Open and migrate.

    Args:
        url: `sqlite:////absolute/path/store.db` or `postgresql+psycopg://user@host/database`.
        create: make the store if it does not exist, and the project's if it is nobody's.
        project: whose store it has to be; `None` does not look.
        trouble: who is told that the store was made anew; with it, a corrupt file of ours is set aside.

    Raises:
        ConfigError: if the URL names no database that we know, or its driver is not installed.
        WrongProject: if it is another project's.
        StoreError: if it cannot be opened, is not a store, or does not exist and `create` is false.
        StoreTooNew: if a newer release wrote it.
    """
    if not is_postgres(url):
        with late_import():
            from art_patch.store.backends.sqlite import SqliteDatabase
        return SqliteDatabase(url, create=create, project=project, trouble=trouble)
    with late_import():
        try:
            import_module("psycopg")
        except ImportError as error:
            raise ConfigError(missing_driver(url, error)) from None
        from art_patch.store.backends.postgres import PostgresDatabase
    return PostgresDatabase(url, create=create, project=project, trouble=trouble)
