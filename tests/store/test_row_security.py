"""Roles that `art-patch store grant` limits to a project: they work, and no SQL of theirs reaches another project."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from art_patch.errors import ConfigError, StoreError, WrongProject
from art_patch.store import open_store, read_route
from art_patch.store.schema import tables
from tests.support.crossing import MARK, READS, WRITES, crossed, fill, rows_of
from tests.support.postgres import Server

LIMITED = [table for table in tables.metadata.sorted_tables if "project_id" in table.c]


def asking(server: Server, role: str, database: str) -> Callable[[str], Any]:
    """Sends SQL as this role, and returns its rows, or how many it changed."""
    import psycopg

    def ask(statement: str) -> Any:
        parameters = {"host": str(server._directory), "user": role, "dbname": database, "autocommit": True}
        with psycopg.connect(**parameters) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else cursor.rowcount or 0

    return ask


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
    attempt("SELECT count(*) FROM pg_class WHERE relkind = 'S' AND relnamespace = 'public'::regnamespace", [(0,)])
    attempt("UPDATE projects SET name = 'theirs'", 0)
    attempt("SELECT name FROM projects", [("mine",)])
    attempt("SET ROLE theirs_app", 0)
    attempt("SET ROLE postgres", 0)
    return found


def test_a_role_works_in_its_project_and_reaches_no_other(server, database: str, tmp_path, record_property):
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

    ask = asking(server, "mine_app", database)
    assert ask("SELECT count(*) FROM calls") == [(4,)], "the role sees its own"
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
    number = 7 * len(LIMITED) + 7 + len(tried)
    record_property("figure", [f"attempts of a PostgreSQL role that crossed, of {number}", "0", "0"])
    for store in (limited, theirs, mine, alone):
        store.close()
    for role in ("theirs_app", "mine_app"):
        server.execute(f"DROP OWNED BY {role}", database)
        server.execute(f"DROP ROLE {role}")


@pytest.fixture
def roles(server: Server, database: str) -> Iterator[list[str]]:
    """Two roles; all that they have is gone afterwards."""
    names = ["mine_app", "helper"]
    for name in names:
        server.execute(f"CREATE ROLE {name} LOGIN")
    yield names
    for name in names:
        # What still runs with its rights would wait for these locks, and these for it.
        server.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{name}'")
        server.execute(f"REASSIGN OWNED BY {name} TO postgres", database)
        server.execute(f"DROP OWNED BY {name}", database)
        server.execute(f"DROP ROLE {name}")


def test_each_project_counts_its_decisions_by_itself(server, database: str, roles: list[str]):
    """A role can neither take the numbers of another project nor see how far they are."""
    owner = server.url(database)
    theirs, mine = open_store(owner, project="theirs"), open_store(owner, project="mine")
    server.execute(mine.maintain.sql_for_role("mine_app"), database)
    for store in (theirs, mine):
        store.ledger.add_base("agent@0", "/base", "ff", who="t")
    assert [[row["id"] for row in store.ledger.history()] for store in (theirs, mine)] == [[2, 1], [2, 1]]
    ask = asking(server, "mine_app", database)
    said = "1, 'me', 'x', '{}', '', '', 2, 1"
    columns = "id, at, who, action, detail, previous, hash, project_id, agent_id"
    assert ask(f"INSERT INTO audit ({columns}) SELECT n, {said} FROM generate_series(100, 2000) AS n") == 1901
    said = "'agent@0', 'champion', 1, 'me', '', '{}', 2, 1"
    columns = "id, policy, to_state, at, who, reason, metrics, project_id, agent_id"
    assert ask(f"INSERT INTO promotions ({columns}) SELECT n, {said} FROM generate_series(100, 2000) AS n") == 1901
    theirs.ledger.add_base("other@0", "/base", "ff", who="t")
    theirs.ledger.set_mode("record", who="t")
    assert [row["id"] for row in theirs.ledger.history()] == [3, 2, 1]
    assert [problem for problem in theirs.verify() if "audit" in problem] == [
        "audit entry 100 was altered or an entry before it is gone"
    ]
    theirs.close()
    mine.close()


VOID = {
    "ALTER ROLE mine_app SUPERUSER": "is a superuser or has BYPASSRLS",
    "ALTER ROLE mine_app BYPASSRLS": "is a superuser or has BYPASSRLS",
    "ALTER ROLE mine_app REPLICATION": "has REPLICATION or CREATEROLE",
    "ALTER ROLE mine_app CREATEROLE": "has REPLICATION or CREATEROLE",
    "ALTER ROLE helper BYPASSRLS; GRANT helper TO mine_app": "is a superuser or has BYPASSRLS",
    "ALTER ROLE helper BYPASSRLS; GRANT helper TO mine_app WITH INHERIT FALSE": "is a superuser or has BYPASSRLS",
    "GRANT pg_write_server_files TO mine_app": "reaches the files of the server",
    "ALTER SCHEMA public OWNER TO mine_app": "owns the schema",
    "ALTER SCHEMA public OWNER TO helper; GRANT helper TO mine_app": "owns the schema",
    "ALTER DATABASE {database} OWNER TO mine_app": "owns the database",
    "ALTER TABLE calls OWNER TO mine_app": "owns a table",
    "ALTER TABLE alembic_version OWNER TO helper; GRANT helper TO mine_app": "owns a table",
    "GRANT CREATE ON DATABASE {database} TO mine_app": "may CREATE schemas",
    "GRANT CREATE ON SCHEMA public TO PUBLIC": "may CREATE functions in the schema",
    "GRANT CREATE ON SCHEMA public TO helper; GRANT helper TO mine_app": "may CREATE functions in the schema",
    "GRANT TRUNCATE ON calls TO helper; GRANT helper TO mine_app": "may TRUNCATE",
    "GRANT TRIGGER ON calls TO helper; GRANT helper TO mine_app": "may TRUNCATE",
    "GRANT REFERENCES (id) ON calls TO helper; GRANT helper TO mine_app": "may TRUNCATE",
    "CREATE POLICY all_rows ON calls USING (true)": "has another policy",
    "CREATE POLICY helper ON calls TO helper USING (true); GRANT helper TO mine_app": "has another policy",
}
"""What gets a role round its limits, and what the refusal says."""


@pytest.mark.parametrize("statement", VOID)
def test_who_cannot_be_limited_is_refused(server, database: str, roles: list[str], statement: str):
    import psycopg

    store = open_store(server.url(database), project="mine")
    limit = store.maintain.sql_for_role("mine_app")
    store.close()
    server.execute(limit, database)
    server.execute(statement.format(database=database), database)
    said = rf"role mine_app cannot be limited to a project: it, or a role .*{VOID[statement]}"
    with pytest.raises(psycopg.errors.RaiseException, match=said):
        server.execute(limit, database)


def test_other_rights_on_the_tables_are_taken_away(server, database: str, roles: list[str]):
    import psycopg

    store = open_store(server.url(database), project="mine")
    for whom in ("PUBLIC", "mine_app"):
        server.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {whom}", database)
    server.execute("GRANT CREATE ON SCHEMA public TO mine_app", database)
    server.execute(store.maintain.sql_for_role("mine_app"), database)
    ask = asking(server, "mine_app", database)
    for statement in (
        "TRUNCATE calls",
        "CREATE TEMP TABLE spy (id text, project_id int, FOREIGN KEY (id, project_id) REFERENCES calls)",
        "CREATE TABLE spy (id text, project_id int, FOREIGN KEY (id, project_id) REFERENCES calls)",
        "CREATE TRIGGER spy AFTER INSERT ON calls EXECUTE FUNCTION suppress_redundant_updates_trigger()",
        "UPDATE alembic_version SET version_num = '9'",
        "DELETE FROM projects",
        "CREATE FUNCTION quote_ident(name) RETURNS text LANGUAGE sql AS 'SELECT $1::text'",
    ):
        with pytest.raises((psycopg.errors.InsufficientPrivilege, psycopg.errors.InvalidTableDefinition)):
            ask(statement)
    store.close()


def test_a_file_has_no_roles(sqlite_url: str):
    store = open_store(sqlite_url, project="mine")
    with pytest.raises(ConfigError, match="SQLite has no roles"):
        store.maintain.sql_for_role("x")
    store.close()
