"""The schema: what a new store is, what an older one becomes, and whose rows it holds."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine

from art_patch.errors import StoreError, StoreTooNew
from art_patch.store import HEAD, open_store
from art_patch.store.schema import migrations, tables
from art_patch.types import AppReport, Correction, Group, Score, SpanInfo
from tests.support.next_release import MIGRATION, NEXT
from tests.support.postgres import Execute
from tests.support.store_samples import call, info, policy

FIRST_SCHEMA = Path(__file__).with_name("first_schema")
"""What a store was at revision 0001, as SQL. These files never change."""

SHAPE = {
    "sqlite": (
        'SELECT m.name, c.name, c.type, c."notnull", c.dflt_value, c.pk FROM sqlite_master AS m, '
        "pragma_table_xinfo(m.name) AS c ORDER BY 1, 2",
        "SELECT name, tbl_name, sql FROM sqlite_master WHERE type != 'table' ORDER BY name",
        'SELECT m.name, i.origin, i."unique", c.name FROM sqlite_master AS m, pragma_index_list(m.name) AS i, '
        "pragma_index_info(i.name) AS c WHERE m.type = 'table' ORDER BY 1, 2, 3, 4",
    ),
    "postgresql": (
        "SELECT table_name, column_name, data_type, is_nullable, column_default, character_maximum_length "
        "FROM information_schema.columns WHERE table_schema = 'public' ORDER BY 1, 2",
        "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public' ORDER BY 1",
        "SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint "
        "WHERE connamespace = 'public'::regnamespace ORDER BY 1",
    ),
}
"""What a database says of its tables. A column that was added later stands behind the others."""

Make = Callable[[str], None]


def kind_of(url: str) -> str:
    return "sqlite" if url.startswith("sqlite") else "postgresql"


def make_first(url: str) -> None:
    """Make a store as the first release did."""
    if url.startswith("sqlite"):
        Path(url.removeprefix("sqlite:///")).parent.mkdir(exist_ok=True)
    with connected(url) as connection:
        for statement in (FIRST_SCHEMA / f"{kind_of(url)}.sql").read_text().split(";\n"):
            if statement:
                connection.exec_driver_sql(statement)


@contextmanager
def connected(url: str) -> Iterator[Connection]:
    engine = create_engine(url)
    try:
        with engine.begin() as connection:
            yield connection
    finally:
        engine.dispose()


def remove(url: str, execute: Execute) -> None:
    if url.startswith("sqlite"):
        for file in Path(url.removeprefix("sqlite:///")).parent.glob("store.db*"):
            file.unlink()
    else:
        execute("DROP SCHEMA public CASCADE")
        execute("CREATE SCHEMA public")


def shape(url: str, execute: Execute) -> list[list[str]]:
    looks = (*SHAPE[kind_of(url)], "SELECT * FROM alembic_version", "SELECT * FROM projects", "SELECT * FROM agents")
    # SQLite keeps the words of the statement, so its white space is left out.
    return [
        ["".join(str(row).replace("\\n", "").replace("\\t", "").split()) for row in execute(look)] for look in looks
    ]


def test_a_new_store_is_what_an_old_one_becomes(url: str, execute: Execute):
    make_first(url)
    open_store(url).close()
    migrated = shape(url, execute)
    assert all(migrated)
    remove(url, execute)
    open_store(url).close()
    assert shape(url, execute) == migrated


def test_migrations_make_exactly_the_declared_tables(url: str):
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory

    make_first(url)
    open_store(url).close()
    of_postgresql = {"search_calls_words"} if url.startswith("sqlite") else set[str]()  # alembic looks at no `ddl_if`
    opts = {"include_object": lambda _, name, *__: name not in of_postgresql}
    with connected(url) as connection:
        assert compare_metadata(MigrationContext.configure(connection, opts=opts), tables.metadata) == []
    assert ScriptDirectory(str(migrations.DIRECTORY)).get_current_head() == HEAD


def test_an_older_store_is_migrated_where_it_is(url: str, execute: Execute, tmp_path: Path, monkeypatch):
    store = open_store(url, project="shop")
    store.write([info(), call("c1")])
    store.close()
    directory = tmp_path / "migrations"
    shutil.copytree(migrations.DIRECTORY, directory)
    (directory / "versions" / f"{NEXT}_later.py").write_text(MIGRATION)
    monkeypatch.setattr(migrations, "DIRECTORY", directory)
    monkeypatch.setattr(tables, "HEAD", NEXT)
    store = open_store(url, create=False, project="shop")
    assert (store.read.counts()["calls"], store.verify()) == (1, [])
    store.close()
    assert execute("SELECT version_num FROM alembic_version") == [(NEXT,)]
    assert execute("SELECT count(*) FROM later") == [(0,)]


def test_another_projects_tables_are_left_alone(url: str, execute: Execute):
    if url.startswith("sqlite"):
        Path(url.removeprefix("sqlite:///")).parent.mkdir()
    execute("CREATE TABLE alembic_version (version_num text)")
    execute("INSERT INTO alembic_version VALUES ('0001')")
    with pytest.raises(StoreError, match="not a store of art_patch"):
        open_store(url)


def test_a_newer_store_is_refused(url: str, execute: Execute):
    open_store(url).close()
    execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(StoreTooNew, match="newer release"):
        open_store(url)


def test_an_app_writes_to_a_newer_store_if_its_schema_was_only_added_to(url: str, execute: Execute):
    open_store(url).close()
    execute("CREATE TABLE later (id integer)")
    execute(f"UPDATE alembic_version SET version_num = '{NEXT}'")
    with pytest.raises(StoreTooNew, match="newer release"):
        open_store(url)  # a command or a server
    store = open_store(url, trouble=lambda *_: None)  # an app's recorder
    store.write([info(), call("c1")])
    store.close()
    assert execute("SELECT count(*) FROM calls") == [(1,)]
    assert execute("SELECT version_num FROM alembic_version") == [(NEXT,)]
    execute("UPDATE alembic_version SET version_num = '0100'")
    with pytest.raises(StoreTooNew, match="newer release"):
        open_store(url, trouble=lambda *_: None)


@pytest.mark.parametrize("revision", ["0001", "0007"])
def test_a_store_of_an_unreleased_version_is_refused_and_left_alone(url: str, execute: Execute, revision: str):
    if url.startswith("sqlite"):
        Path(url.removeprefix("sqlite:///")).parent.mkdir()
    execute("CREATE TABLE nodes (id text, parent text, body text)")
    execute("CREATE TABLE alembic_version (version_num text)")
    execute(f"INSERT INTO alembic_version VALUES ('{revision}')")
    for create in (True, False):
        with pytest.raises(StoreError, match=r"before its first release.*move it away, or name another store") as error:
            open_store(url, create=create)
        assert type(error.value) is StoreError
    assert execute("SELECT * FROM alembic_version") == [(revision,)]
    if url.startswith("sqlite"):
        assert sorted(name for (name,) in execute("SELECT name FROM sqlite_master")) == ["alembic_version", "nodes"]


def test_every_table_says_whose_its_rows_are():
    without_agent = {"nodes", "token_blocks", "blobs", "search_calls"}
    for name, table in tables.metadata.tables.items():
        if name in ("projects", "agents"):
            continue
        assert not table.c.project_id.nullable
        assert ("agent_id" in table.c) == (name not in without_agent)
        numbered = [column.name for column in table.primary_key] == ["id"] and name in ("audit", "promotions")
        assert numbered or "project_id" in table.primary_key.columns, f"two projects could not both use a key of {name}"


RECORDS: list[Any] = [
    info(session_id="s", user_id="u"),
    call("c1"),
    SpanInfo("s1", "t1", "plan", 1.0),
    Score("k", "t1", "reward", 1.0, "user", 2.0),
    Correction("x", "t1", 3.0, "user", {"role": "assistant", "content": "right"}),
    AppReport("host-1", 4.0, {"calls": 1}),
]


def test_two_projects_can_use_the_same_ids_and_content(url: str, execute: Execute):
    store, other = open_store(url, project="shop"), open_store(url, project="billing")
    for one in (store, other):
        one.write(RECORDS)
        one.ledger.add_groups([Group("g", "task", "same_task", ())], now=1.0)
    for name in ("nodes", "blobs", "trajectories", "calls", "choices", "spans", "scores", "corrections", "apps"):
        (first, second) = execute(f"SELECT project_id, count(*) FROM {name} GROUP BY project_id ORDER BY 1")
        assert (first[0], second[0], first[1]) == (1, 2, second[1]), name
    assert execute("SELECT project_id FROM groups ORDER BY 1") == [(1,), (2,)]
    assert execute("SELECT project_id FROM scenarios ORDER BY 1") == [(1,), (2,)]
    assert store.verify() == []
    store.close()
    other.close()


def test_an_agent_is_named_by_its_first_policy(url: str, execute: Execute):
    store = open_store(url, project="shop")
    store.write(RECORDS)
    assert execute("SELECT id, project_id, name FROM agents") == [(1, 1, None)]
    store.ledger.add_base("agent@0", "/base", "ff", who="test")
    store.ledger.add_candidate(policy(1), trained_on=["g"], who="test")
    assert execute("SELECT id, project_id, name FROM agents") == [(1, 1, "agent")]
    assert execute("SELECT DISTINCT agent_id FROM calls") == [(1,)]
    store.ledger.add_base("other@0", "/base", "ff", who="test")
    assert execute("SELECT id, project_id, name FROM agents ORDER BY id") == [(1, 1, "agent"), (2, 1, "other")]
    assert execute("SELECT name, agent_id FROM policies ORDER BY 1") == [("agent@0", 1), ("agent@1", 1), ("other@0", 2)]
    assert execute("SELECT policy, agent_id FROM promotions ORDER BY id")[-1] == ("other@0", 2)
    assert execute("SELECT DISTINCT agent_id FROM trainings") == [(1,)]
    store.close()


def test_calls_and_scores_repeat_their_runs_session_and_user(url: str, execute: Execute):
    def whose(table: str) -> list[tuple[Any, ...]]:
        return execute(f"SELECT id, session_id, user_id FROM {table} ORDER BY id")

    store, other = open_store(url), open_store(url)
    store.write([info(), call("c1"), info("t2", session_id="s2", user_id="u2"), call("d1", "t2")])
    assert whose("calls") == [("c1", None, None), ("d1", "s2", "u2")]
    store.write([call("c2"), info(session_id="s1")])  # the framework named the session after the first call
    assert whose("calls") == [("c1", "s1", None), ("c2", "s1", None), ("d1", "s2", "u2")]
    store.write([info(user_id="", ended_at=8.0)])  # an empty name is a name, here as in the run's own row
    assert whose("calls") == [("c1", "s1", ""), ("c2", "s1", ""), ("d1", "s2", "u2")]
    store.write([info(user_id="u1", ended_at=9.0)])
    store.write([call("c3")])
    other.write([Score("k1", "t1", "reward", 1.0, "user", 2.0), Score("k2", "t2", "reward", 1.0, "user", 2.0)])
    other.write([call("d2", "t2"), Score("k3", "gone", "reward", 1.0, "user", 2.0)])
    assert whose("calls") == [("c1", "s1", "u1"), ("c2", "s1", "u1"), ("c3", "s1", "u1"), *[
        (key, "s2", "u2") for key in ("d1", "d2")
    ]]  # fmt: skip
    assert whose("scores") == [("k1", "s1", "u1"), ("k2", "s2", "u2"), ("k3", None, None)]
    assert store.verify() == []
    store.close()
    other.close()
