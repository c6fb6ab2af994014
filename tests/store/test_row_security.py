"""Roles that `art-patch store grant` limits to a project: they work, and no SQL of theirs reaches another project."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from art_patch.errors import ConfigError, StoreError, WrongProject
from art_patch.store import open_store, read_route
from art_patch.store.schema import tables
from tests.support.crossing import MARK, READS, WRITES, crossed, fill, rows_of

LIMITED = [table for table in tables.metadata.sorted_tables if "project_id" in table.c]


def crossings(ask: Callable[[str], Any]) -> dict[str, str]:
    """What a role of `mine` (project 2) tries on `theirs` (project 1) in raw SQL, and how it succeeded."""
    import psycopg

    found: dict[str, str] = {}

    def attempt(statement: str, allowed: object) -> None:
        try:
            result = ask(statement)
        except psycopg.errors.InsufficientPrivilege:
            result = allowed
        if result != allowed:
            found[statement] = str(result)

    for table in LIMITED:
        attempt(f"SELECT count(*) FROM {table.name} WHERE project_id = 1", [(0,)])
        attempt(f"UPDATE {table.name} SET project_id = 2 WHERE project_id = 1", 0)
        attempt(f"UPDATE {table.name} SET project_id = 1", 0)
        attempt(f"DELETE FROM {table.name} WHERE project_id = 1", 0)
        attempt(f"TRUNCATE {table.name}", 0)
        attempt(f"ALTER TABLE {table.name} DISABLE ROW LEVEL SECURITY", 0)
        attempt(f"DROP POLICY mine_app ON {table.name}", 0)
    attempt("INSERT INTO scenarios VALUES ('new', false, 1.0, 1, 1)", 0)
    attempt("INSERT INTO projects VALUES (3, 'new')", 0)
    attempt("UPDATE projects SET name = 'theirs'", 0)
    attempt("SELECT name FROM projects", [("mine",)])
    attempt("SET ROLE theirs_app", 0)
    attempt("SET ROLE postgres", 0)
    return found


def test_a_role_works_in_its_project_and_reaches_no_other(server, database: str, tmp_path, record_property):
    import psycopg

    owner = server.url(database)
    theirs, mine = open_store(owner, project="theirs"), open_store(owner, project="mine")
    alone = open_store(f"sqlite:///{tmp_path}/alone.db", project="mine")
    fill(theirs, "zebra", MARK)
    for role, store in (("theirs_app", theirs), ("mine_app", mine)):
        server.execute(f"DROP ROLE IF EXISTS {role}")
        server.execute(f"CREATE ROLE {role} LOGIN")
        for _ in range(2):  # again, as after an upgrade
            server.execute(store.maintain.sql_for_role(role), database)
    url = server.url(database, login="mine_app")
    before = rows_of(theirs, "theirs")
    assert all(before.values())

    limited = open_store(url, project="mine")
    for store in (limited, alone):
        fill(store, "own", "mine")

    def ask(statement: str) -> Any:
        parameters = {"host": str(server._directory), "user": "mine_app", "dbname": database, "autocommit": True}
        with psycopg.connect(**parameters) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else cursor.rowcount or 0

    assert ask("SELECT count(*) FROM calls") == [(2,)], "the role sees its own"
    assert crossings(ask) == {}
    assert rows_of(theirs, "theirs") == before
    # What the package itself does as this role.
    tried = {name: crossed(limited, alone, theirs, each) for name, each in (READS | WRITES).items()}
    assert {name: how for name, how in tried.items() if how} == {}
    assert rows_of(theirs, "theirs") == before
    assert limited.verify() == []
    assert read_route(url, "theirs").champion is None
    with pytest.raises(WrongProject, match="has no project 'theirs', but: mine"):
        open_store(url, create=False, project="theirs")
    with pytest.raises(StoreError, match="limited to another project"):
        open_store(url, project="theirs")
    number = 7 * len(LIMITED) + 6 + len(tried)
    record_property("figure", [f"attempts of a PostgreSQL role that crossed, of {number}", "0", "0"])
    for store in (limited, theirs, mine, alone):
        store.close()
    for role in ("theirs_app", "mine_app"):
        server.execute(f"DROP OWNED BY {role}", database)
        server.execute(f"DROP ROLE {role}")


def test_who_cannot_be_limited_is_refused(server, database: str):
    store = open_store(server.url(database), project="mine")
    with pytest.raises(Exception, match="cannot be limited"):
        server.execute(store.maintain.sql_for_role("postgres"), database)
    store.close()


def test_a_file_has_no_roles(sqlite_url: str):
    store = open_store(sqlite_url, project="mine")
    with pytest.raises(ConfigError, match="SQLite has no roles"):
        store.maintain.sql_for_role("x")
    store.close()
