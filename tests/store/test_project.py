"""A store has any number of projects. Each one's rows are its own, and only who writes may add a project."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, exists, select, update

from art_patch.errors import StoreError, WrongProject
from art_patch.store import Store, open_store, read_route
from art_patch.store.schema import tables
from art_patch.store.schema.tables import whole
from art_patch.types import Score
from tests.support.postgres import Execute
from tests.support.statements import Watch, unlimited
from tests.support.store_samples import call, info

PROJECTS = "SELECT id, name FROM projects ORDER BY id"
REFUSED = r"has no project 'billing', but: shop; name one of these with --project"


def test_who_writes_adds_its_project_and_who_reads_does_not(url: str, execute: Execute):
    open_store(url, project="shop").close()
    with pytest.raises(WrongProject, match=REFUSED):
        open_store(url, create=False, project="billing")
    assert execute(PROJECTS) == [(1, "shop")]
    open_store(url, project="billing").close()
    for project in ("shop", "billing"):
        open_store(url, create=False, project=project).close()
    assert execute(PROJECTS) == [(1, "shop"), (2, "billing")]
    assert execute("SELECT id, project_id FROM agents ORDER BY 2") == [(1, 1), (1, 2)]


def test_a_store_that_nobody_named_is_bound_by_whoever_writes(url: str, execute: Execute):
    store = open_store(url)
    store.write([info(), call("c1")])
    store.close()
    open_store(url, create=False, project="billing").close()
    assert execute(PROJECTS) == [(1, None)], "a command that is mistyped must not take it"
    store = open_store(url, project="shop")
    assert store.read.counts()["calls"] == 1
    store.close()
    assert execute(PROJECTS) == [(1, "shop")]
    with pytest.raises(WrongProject, match=REFUSED):
        open_store(url, create=False, project="billing")


def test_programs_that_name_no_project_get_the_only_one(url: str):
    open_store(url, project="shop").close()
    store = open_store(url)
    store.write([info(), call("c1")])
    assert (store.read.counts()["calls"], store.verify()) == (1, [])
    store.close()
    open_store(url, project="billing").close()
    store = open_store(url)
    assert store.verify() == [], "this is about all of them"
    with pytest.raises(KeyError):
        store.read.counts()
    with pytest.raises(KeyError):
        store.write([info("t2"), call("c2", "t2")])
    store.close()


def test_the_password_is_not_shown(url: str):
    open_store(url, project="shop").close()
    if url.startswith("postgresql"):
        url = url.replace("postgres@", "postgres:s3cret@")
    with pytest.raises(WrongProject, match=REFUSED) as refused:
        open_store(url, create=False, project="billing")
    assert "s3cret" not in str(refused.value)


def test_projects_that_begin_at_once_get_ids_of_their_own(url: str, execute: Execute):
    opened: list[Store] = []
    start = threading.Barrier(6)

    def make(project: str) -> None:
        start.wait()
        opened.append(open_store(url, project=project))

    threads = [threading.Thread(target=make, args=(name,)) for name in ("shop", "billing", "support") * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 6
    for store in opened:
        store.write([info(), call("c1")])
        assert store.read.counts()["calls"] == 1
        store.close()
    assert sorted(name for _, name in execute(PROJECTS)) == ["billing", "shop", "support"]
    assert execute("SELECT count(*) FROM calls") == [(3,)]


def test_schemas_of_one_database_are_stores_of_their_own(server, database: str):
    urls = {}
    for project in ("shop", "billing"):
        server.execute(f"CREATE SCHEMA {project}", database)
        urls[project] = server.url(database, query=f"&options=-csearch_path%3D{project}")
        open_store(urls[project], project=project).close()
    with pytest.raises(WrongProject, match=REFUSED):
        open_store(urls["shop"], create=False, project="billing")


def test_a_writer_adds_its_project_to_another_file_that_took_the_place(sqlite_url: str, tmp_path: Path):
    """Its id may be another one there."""
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    store = open_store(sqlite_url, project="shop")
    store.write([info(), call("c1")])
    other = tmp_path / "other.db"
    before = open_store(f"sqlite:///{other}", project="billing")
    before.write([info(), call("b1")])
    before.close()
    for file in path.parent.glob(f"{path.name}-*"):
        file.unlink()
    other.replace(path)
    store.write([info("t2"), call("c2", "t2")])
    assert [run.id for run in store.read.recent()] == ["t2"]
    store.ledger.set_mode("record", who="t")
    assert (read_route(sqlite_url, "shop").mode, read_route(sqlite_url, "billing").mode) == ("record", None)
    assert store.verify() == []
    store.close()
    foreign = open_store(sqlite_url, project="billing")
    assert [run.id for run in foreign.read.recent()] == ["t1"]
    foreign.close()


@pytest.fixture
def make_anew(url: str, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[], None]:
    """Deletes the store, behind the back of those who have it open, and makes one whose first project is `billing`."""

    def write(into: str) -> None:
        other = open_store(into, project="billing")
        other.write([info("theirs"), call("b1", "theirs")])
        other.ledger.set_mode("off", who="t")
        other.close()

    def on_server() -> None:
        server, database = request.getfixturevalue("server"), request.getfixturevalue("database")
        server.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public", database)
        write(url)

    def as_file() -> None:
        path, other = Path(url.removeprefix("sqlite:///")), tmp_path / "other.db"
        write(f"sqlite:///{other}")
        for file in path.parent.glob(f"{path.name}-[sw]*"):
            file.unlink()
        other.replace(path)

    return as_file if url.startswith("sqlite") else on_server


def again(operation: Callable[[], Any]) -> Any:
    try:
        return operation()
    except StoreError as error:
        assert "was made anew by another process; try again" in str(error)
        return operation()


def test_an_open_store_that_others_made_anew_reaches_no_project_of_theirs(url: str, make_anew: Callable[[], None]):
    store, idle = open_store(url, project="shop"), open_store(url, create=False, project="shop")
    store.write([info("mine"), call("c1", "mine")])
    assert len(idle.read.recent()) == 1
    # On SQLite an open connection goes on reading the deleted file. One more is to the new file.
    busy = [one._database._calls.connect() for one in (store, idle)] if url.startswith("sqlite") else []
    make_anew()
    with pytest.raises(WrongProject, match="has no project 'shop', but: billing"):
        again(idle.read.recent)
    assert again(store.read.recent) == ()
    again(lambda: store.ledger.set_mode("record", who="t"))
    store.write([info("mine"), call("c1", "mine")])
    assert [run.id for run in store.read.recent()] == ["mine"]
    theirs = open_store(url, create=False, project="billing")
    assert [run.id for run in theirs.read.recent()] == ["theirs"]
    assert (theirs.ledger.route().mode, store.ledger.route().mode) == ("off", "record")
    assert theirs.verify() == []
    for one in (store, idle, theirs, *busy):
        one.close()


def test_a_store_that_is_made_anew_while_a_write_begins_is_no_harm(url: str, make_anew: Callable[[], None]):
    """On SQLite the file may be replaced between the look at it and the first statement."""
    store = open_store(url, project="shop")
    store.write([info("mine"), call("c1", "mine")])
    renew, times = store._database.renew, iter([make_anew])

    def renew_and_lose() -> None:
        renew()
        for lose in times:
            lose()
            store._database.let_go()

    store._database.renew = renew_and_lose  # type: ignore[method-assign]
    # What has a score is written over another connection, the first of its kind, which opens what is there now.
    store.write([call("c2", "mine"), Score("s1", "mine", "reward", 1.0, "user", 2.0)])
    assert [run.id for run in store.read.recent()] == ["mine"]
    theirs = open_store(url, create=False, project="billing")
    assert [run.id for run in theirs.read.recent()] == ["theirs"]
    assert (theirs.read.counts()["calls"], theirs.verify()) == (1, [])
    theirs.close()
    store.close()


def test_every_statement_says_of_which_project_its_rows_are(url: str, statements: Watch):
    """The same is looked at in every other test (`tests/conftest.py`)."""
    open_store(url, project="shop").close()
    store = open_store(url, project="billing")
    calls, t = tables.calls, tables.trajectories
    reads = [
        select(calls.c.id),
        select(calls.c.id).join(t, t.c.id == calls.c.trajectory_id),
        select(t.c.id).outerjoin(calls, t.c.id == calls.c.trajectory_id),
        select(t.c.id).where(exists().where(calls.c.trajectory_id == t.c.id)),
        select(calls.alias("other").c.id),
        select(t.c.id).where(t.c.id.in_(select(calls.c.trajectory_id).union(select(calls.c.id)))),
        select(select(calls.c.id).cte("some").c.id),
    ]
    writes = [
        update(t).where(t.c.id.in_(select(calls.c.trajectory_id))).values(name=select(calls.c.id).scalar_subquery()),
        delete(t).where(t.c.id == "x"),
    ]
    before = statements.seen
    with store._database.write() as connection:
        for statement in (*reads, *writes):
            text = str(statement.compile(dialect=connection.dialect))
            assert ("project_id = 2" in text, unlimited(text)) == (True, set()), text
            connection.execute(statement)
    assert statements.seen > before
    store.close()
    for statement in (*reads, *writes):
        assert unlimited(str(statement.compile())), "the watch itself would find it"
    assert unlimited(str(select(whole.calls.c.id))) == {"calls"}
