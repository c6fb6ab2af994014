"""Every test that asks for a `url` or a `store` runs twice: over a file, and over a real PostgreSQL server."""

from __future__ import annotations

import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from art_patch.store import Store, open_store
from tests.support.postgres import Execute, Server, new_server


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
