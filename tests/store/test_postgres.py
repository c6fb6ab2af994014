"""What is true of a store on a server only: many machines, a network between, and a server that comes and goes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psycopg
import pytest

import art_patch as art
from art_patch.errors import ConfigError, StoreError, StoreTooNew, TransitionError
from art_patch.settings import Settings
from art_patch.store import (
    HEAD,
    Store,
    absolute_url,
    open_store,
    postgres_parameters,
    read_route,
    without_password,
)
from art_patch.store.backends.database import DECISIONS, WRITERS
from art_patch.store.backends.postgres import PostgresDatabase
from art_patch.store.ledger import route as route_module
from tests.support.postgres import Execute, Server, new_server
from tests.support.servers import StubServer, serving
from tests.support.store_samples import call, info, policy

ROOT = Path(__file__).parents[2]


@pytest.fixture
def url(postgres_url: str) -> str:
    return postgres_url


@pytest.fixture
def opened(store: Store) -> PostgresDatabase:
    found = store._database
    assert isinstance(found, PostgresDatabase)
    return found


@pytest.fixture
def open_again(url: str) -> Iterator[Callable[[], Store]]:
    """Another store on the same tables, as another process would have it."""
    more: list[Store] = []

    def another() -> Store:
        more.append(open_store(url))
        return more[-1]

    yield another
    for store in more:
        store.close()


def all_at_once(*jobs: Callable[[], Any]) -> list[Any]:
    barrier = threading.Barrier(len(jobs))

    def run(job: Callable[[], Any]) -> Any:
        barrier.wait(10)
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(run, jobs))


# Transactions and locks


def test_calls_are_committed_lightly_and_decisions_durably(opened: PostgresDatabase):
    shown = (
        "SELECT current_setting('synchronous_commit'), current_setting('transaction_isolation'), mode "
        "FROM pg_locks WHERE classid = "
    )
    with opened.write() as connection:
        assert connection.exec_driver_sql(f"{shown}{WRITERS}").all() == [("off", "read committed", "ShareLock")]
    with opened.write(durable=True, exclusive=True) as connection:
        assert connection.exec_driver_sql(f"{shown}{WRITERS}").all() == [("on", "read committed", "ExclusiveLock")]
    with opened.read() as connection:
        assert connection.exec_driver_sql("SHOW transaction_isolation").scalar() == "repeatable read"
        assert connection.exec_driver_sql("SHOW transaction_read_only").scalar() == "on"


def test_who_writes_alone_waits_for_writers_and_they_for_him(opened: PostgresDatabase):
    order: list[str] = []
    writing = threading.Event()

    def shared():
        with opened.write():
            writing.set()
            time.sleep(0.3)
            order.append("writer")

    def alone():
        writing.wait(5)
        with opened.write(exclusive=True):
            order.append("alone")

    all_at_once(shared, alone)
    assert order == ["writer", "alone"]


def test_writers_of_the_same_messages_do_not_stop_each_other(open_again: Callable[[], Store], store: Store):
    def writer(number: int) -> Callable[[], None]:
        mine = open_again()

        def write():
            for batch in range(15):
                texts = [f"{batch} {n}" for n in range(8)]
                texts = texts if number % 2 else texts[::-1]
                keys = [f"{number}-{batch}-{n}" for n in range(8)]
                calls = [
                    call(key, f"t{number}", messages=({"role": "user", "content": text},))
                    for key, text in zip(keys, texts, strict=True)
                ]
                mine.write([info(f"t{number}"), *calls])

        return write

    all_at_once(*(writer(number) for number in range(6)))
    assert store.read.counts()["calls"] == 6 * 15 * 8
    assert store.verify() == []


def test_a_deadlock_is_tried_again(store: Store, server: Server, database: str, execute: Execute):
    store.write([info("t"), info("u")])

    def other():
        with psycopg.connect(server.url(database).replace("+psycopg", "")) as connection:
            connection.execute("UPDATE trajectories SET name = 'x' WHERE id = 'u'")
            time.sleep(0.5)  # the store has taken `t` by now, and waits for `u`
            connection.execute("SET LOCAL deadlock_timeout = '30s'")
            connection.execute("UPDATE trajectories SET name = 'x' WHERE id = 't'")

    def ours():
        time.sleep(0.2)
        store.write([info("t", user_id="me"), info("u", user_id="me")])

    all_at_once(other, ours)
    assert execute("SELECT id, name, user_id FROM trajectories ORDER BY id") == [("t", "x", "me"), ("u", "x", "me")]


def test_which_errors_are_worth_another_try(opened: PostgresDatabase):
    def error(code: str) -> StoreError:
        with pytest.raises(StoreError) as found, opened.write() as connection:
            connection.exec_driver_sql(f"DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '{code}'; END $$")
        return found.value

    assert [opened.should_retry(error(code)) for code in ("40001", "40P01", "23505", "57014")] == [
        True, True, False, False,
    ]  # fmt: skip


def test_a_read_sees_one_state(opened: PostgresDatabase, store: Store, open_again: Callable[[], Store]):
    with opened.read() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM calls").scalar() == 0
        open_again().write([info(), call("c1")])
        assert connection.exec_driver_sql("SELECT count(*) FROM calls").scalar() == 0
    assert store.read.counts()["calls"] == 1


# The ledger, from many machines


def test_decisions_of_many_machines_make_one_chain_and_one_champion(store: Store, open_again: Callable[[], Store]):
    store.ledger.add_base("agent@0", "/base", "ff", who="test", now=0.0)

    def machine(number: int) -> Callable[[], bool]:
        mine = open_again().ledger

        def decide() -> bool:
            for _ in range(5):
                mine.set_mode("record", who=f"m{number}")
            mine.add_candidate(policy(number), trained_on=[], who=f"m{number}")
            mine.move(f"agent@{number}", "champion", who=f"m{number}", reason="won")
            return True

        return decide

    assert all(all_at_once(*(machine(number) for number in range(1, 7))))
    states = [p.state for p in store.ledger.policies()]
    assert (states.count("champion"), states.count("retired")) == (1, 6)
    assert store.verify() == []


def test_a_decision_that_fails_lets_the_next_one_in(store: Store, execute: Execute):
    store.ledger.add_base("agent@0", "/base", "ff", who="test")
    with pytest.raises(TransitionError):
        store.ledger.move("agent@0", "rejected", who="me", reason="x")
    assert execute(f"SELECT count(*) FROM pg_locks WHERE classid IN ({WRITERS}, {DECISIONS})") == [(0,)]
    store.ledger.set_mode("off", who="me")


# Servers that come and go


@pytest.fixture
def own_server() -> Iterator[Server]:
    started = new_server()
    yield started
    started.end()


def test_a_restarted_server_costs_nothing(own_server: Server):
    url = own_server.url(own_server.new_database())
    store = open_store(url)
    store.write([info(), call("c1")])
    store.ledger.add_base("agent@0", "/base", "ff", who="test")
    for restart in range(2):
        own_server.stop()
        with pytest.raises(StoreError, match="see that the server runs"):
            store.write([call("never", messages=())])
        own_server.start()
        store.write([call(f"c{2 + restart}")])
        assert store.ledger.route().champion == "agent@0"
        own_server.stop()
        own_server.start()
        store.ledger.set_mode("record", who="test")  # the first to notice
    assert [c.id for t in store.read.trajectories(["t1"]) for c in t.calls] == ["c1", "c2", "c3"]
    assert store.verify() == []
    store.close()


def test_a_crashed_server_loses_the_last_calls_and_tears_none(own_server: Server):
    """What a crash takes along is written again where later calls need it."""
    store = open_store(own_server.url(own_server.new_database()))
    store.write([info(user_id="u"), call("c1")])
    own_server.stop("immediate")
    own_server.start()
    store.write([call("c2")])
    (trajectory,) = store.read.trajectories(["t1"])
    assert trajectory.info.user_id == "u"
    assert "c2" in [c.id for c in trajectory.calls]
    assert store.verify() == []
    store.ledger.add_base("agent@0", "/base", "ff", who="test")
    own_server.stop("immediate")
    own_server.start()
    assert store.ledger.champion() is not None
    store.close()


def test_tables_that_are_gone_are_made_anew(server: Server, database: str, url: str):
    told: list[tuple[str, str]] = []
    store = open_store(url, trouble=lambda place, error: told.append((place, str(error))))
    store.write([info(), call("c1")])
    server.drop(database)
    server.execute(f"CREATE DATABASE {database}")
    store.write([call("c2")])
    assert [c.id for t in store.read.trajectories(["t1"]) for c in t.calls] == ["c2"]
    assert store.verify() == []
    assert [(place, "made anew" in words) for place, words in told] == [("store.gone", True)]
    store.close()


def test_a_lost_connection_in_the_middle_of_a_write(opened: PostgresDatabase, store: Store, server: Server):
    kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'art_patch'"
    with pytest.raises(StoreError) as found, opened.write() as connection:
        server.execute(kill)
        connection.exec_driver_sql("SELECT 1")
    assert opened.should_retry(found.value)
    store.write([info(), call("c1")])
    server.execute(kill)
    assert store.read.counts()["calls"] == 1


def test_a_server_that_runs_goes_on_in_a_store_that_was_migrated_meanwhile(
    url: str, store: Store, execute: Execute, server: Server
):
    store.write([info()])
    execute(f"UPDATE alembic_version SET version_num = '{int(HEAD) + 1:04}'")
    server.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'art_patch'")
    store.write([call("c1")])
    assert store.read.counts()["calls"] == 1
    with pytest.raises(StoreTooNew):
        open_store(url)


FORKING = """
import os, sys
from art_patch.store import open_store
from tests.support.store_samples import call, info
store = open_store(sys.argv[1])
store.write([info(), call("before")])
for n in range(4):
    pid = os.fork()
    if not pid:
        for m in range(5):
            store.write([info(f"t{n}"), call(f"child-{n}-{m}", f"t{n}")])
        os._exit(0 if store.read.counts()["calls"] > 0 else 1)
    store.write([call(f"parent-{n}")])
print([os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(4)])
store.close()
"""


def test_children_take_connections_of_their_own(store: Store, url: str):
    command = [sys.executable, "-W", "error", "-c", FORKING, url]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (ran.returncode, ran.stdout.strip(), ran.stderr) == (0, "[0, 0, 0, 0]", "")
    assert store.read.counts()["calls"] == 1 + 4 + 20
    assert store.verify() == []


# What is refused, and in which words


@pytest.fixture
def walled(server: Server, database: str) -> Iterator[str]:
    """A role that has to give its password."""
    ((path,),) = server.execute("SHOW hba_file")
    server.execute("CREATE ROLE walled LOGIN PASSWORD 'S3cret/pass@word'")
    server.execute("GRANT ALL ON SCHEMA public TO walled", database)
    server.execute(f"COPY (VALUES ('local all walled scram-sha-256'), ('local all all trust')) TO '{path}'")
    server.execute("SELECT pg_reload_conf()")
    yield "walled"
    server.drop(database)
    server.execute("DROP ROLE walled")


def refusal(url: str, kind: type[Exception] = StoreError) -> str:
    with pytest.raises(kind) as found:
        open_store(url)
    return str(found.value)


def test_each_refusal_says_what_to_do(server: Server, database: str):
    assert "CREATE DATABASE" in refusal(server.url("nowhere"))
    assert "CREATE ROLE" in refusal(server.url(database, "nobody"))
    assert "see that the server runs" in refusal("postgresql+psycopg://u@127.0.0.1:1/x")
    assert "mend the URL" in refusal(server.url(database, query="&colour=red"), ConfigError)
    assert "CREATE SCHEMA" in refusal(server.url(database, query="&options=-csearch_path%3Dnowhere"))
    server.execute(f"CREATE DATABASE {database}_latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    assert "ENCODING 'UTF8'" in refusal(server.url(f"{database}_latin"))
    server.drop(f"{database}_latin")
    server.execute("DROP ROLE IF EXISTS stranger; CREATE ROLE stranger LOGIN")
    assert "GRANT" in refusal(server.url(database, "stranger"))


@pytest.mark.parametrize(
    "bad", ["postgresql://me:S3cret@h/db", "postgres://me:S3cret@h/db", "postgresql+asyncpg://h/db"]
)
def test_another_driver_is_refused_with_the_right_spelling(bad: str):
    for refused in (lambda: open_store(bad), lambda: art.patch(store=bad)):
        with pytest.raises(ConfigError) as found:
            refused()
        assert "postgresql+psycopg://" in str(found.value)
        assert "S3cret" not in str(found.value)


def test_a_missing_driver_is_named(url: str):
    code = "import sys; sys.modules['psycopg'] = None\nfrom art_patch.store import open_store\nopen_store(sys.argv[1])"
    ran = subprocess.run([sys.executable, "-c", code, url], capture_output=True, text=True, timeout=60)
    assert "pip install 'art-patch[postgres]'" in ran.stderr.splitlines()[-1]
    assert "ConfigError" in ran.stderr


def test_two_schemas_hold_two_stores(server: Server, database: str, execute: Execute):
    urls = [server.url(database, query=f"&options=-csearch_path%3D{schema},public") for schema in ("one", "two")]
    stores: list[Store] = []
    for schema, url in zip(("one", "two"), urls, strict=True):
        execute(f"CREATE SCHEMA {schema}")
        stores.append(open_store(url))
    with stores[0]._database.write(exclusive=True):
        stores[1].write([info(), call("c1")])
    stores[1].ledger.set_mode("off", who="test")
    assert [store.read.counts()["calls"] for store in stores] == [0, 1]
    assert [read_route(url).mode for url in urls] == [None, "off"]
    assert execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == [(0,)]
    for store in stores:
        store.close()
    assert read_route(urls[1]).mode == "off"


def test_a_store_that_was_closed_opens_no_connection_again(url: str, execute: Execute):
    open_store(url).close()
    assert read_route(url).mode is None
    assert (
        execute("SELECT query FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()")
        == []
    )


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql+psycopg://u:S3cret@h:5/db", "postgresql+psycopg://u:***@h:5/db"),
        ("postgresql+psycopg://u:S3@cret@h/db", "postgresql+psycopg://u:***@h/db"),
        ("postgresql+psycopg://u:S3/cret@h/db", "postgresql+psycopg://u:***@h/db"),
        ("postgresql+psycopg://u:S3?cret@h/db", "postgresql+psycopg://u:***@h/db"),
        ("postgresql+psycopg://h/db?user=u&password=S3cret&sslpassword=S3", "postgresql+psycopg://h/db?user=u&password=***&sslpassword=***"),
        ("postgresql+psycopg://u@h/db", "postgresql+psycopg://u@h/db"),
        ("sqlite:////tmp/a@b:c/store.db", "sqlite:////tmp/a@b:c/store.db"),
    ],
)  # fmt: skip
def test_a_url_is_shown_without_its_password(url: str, shown: str):
    assert without_password(url) == shown


def test_how_a_url_is_read():
    read = postgres_parameters
    assert read("postgresql+psycopg://u:p%40%2Fw%3A@h:5433/d%20b?sslmode=require&options=-c+a%3Db") == {
        "user": "u", "password": "p@/w:", "host": "h", "port": "5433", "dbname": "d b", "sslmode": "require",
        "options": "-c a=b",
    }  # fmt: skip
    assert read("postgresql+psycopg://[::1]:5/d") == {"host": "::1", "port": "5", "dbname": "d"}
    assert read("postgresql+psycopg://a:1,b:2/d") == {"host": "a,b", "port": "1,2", "dbname": "d"}
    assert read("postgresql+psycopg:///d?host=/tmp") == {"dbname": "d", "host": "/tmp"}
    for bad in ("u:S3/cret@h/db", "u:S3?cret@h/db", "u:S3#/cret@h"):
        with pytest.raises(ConfigError) as found:
            read(f"postgresql+psycopg://{bad}")
        assert "cret" not in str(found.value)
    url = "postgresql+psycopg://u@h/d"
    assert absolute_url(url) == url


def test_a_password_is_never_shown(server: Server, database: str, walled: str, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    wrong, right = (server.url(database, f"{walled}:{word}") for word in ("S3cret%2Fwrong", "S3cret%2Fpass%40word"))
    said = refusal(wrong)
    assert "check user and password in the URL" in said
    with pytest.raises(StoreError) as found:
        read_route(wrong)
    opened = open_store(right)._database
    assert isinstance(opened, PostgresDatabase)
    shown = [said, str(found.value), opened.name, repr(opened), repr(opened._engine), repr(opened._engine.url)]
    shown += [repr(Settings(store=right)), str(Settings(store=right))]
    with pytest.raises(StoreError) as refused, opened.write() as connection:
        connection.exec_driver_sql("nonsense")
    shown += [str(refused.value), str(refused.value.__cause__)]
    opened.close()
    with serving() as upstream, openai.OpenAI(api_key="k", base_url=upstream.url, max_retries=0) as client:
        art.patch(store=right, flush_interval_s=0.01)
        try:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
            assert art.flush(30)
            shown.append(repr(art.status()))
        finally:
            art.unpatch()
    store = open_store(right)
    reports = store.read.apps(since=0.0)
    shown += [repr(report) for report in reports]
    store.close()
    shown += [record.getMessage() for record in caplog.records]
    assert reports
    assert not [text for text in shown if "S3cret" in text]


# The app


@pytest.fixture
def upstream() -> Iterator[StubServer]:
    with serving() as server:
        yield server


APP = """
import json, os, sys
import art_patch as art
import openai
art.patch(flush_interval_s=0.01)
client = openai.OpenAI(api_key="k", base_url=os.environ["UPSTREAM"], max_retries=0)
with art.trajectory(scenario="s", user_id="u"):
    for n in range(3):
        client.chat.completions.create(model="gpt-x", messages=[{"role": "user", "content": f"hi {n}"}])
    art.score("thumbs", 1.0)
assert art.flush(30)
print(json.dumps(art.status(), default=str))
"""


def test_an_app_records_into_postgresql(store: Store, url: str, upstream: StubServer):
    env = os.environ | {"ART_PATCH_STORE": url, "UPSTREAM": upstream.url, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", APP], env=env, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    (trajectory,) = store.read.recent()
    assert [c.messages[-1]["content"] for c in trajectory.calls] == ["hi 0", "hi 1", "hi 2"]
    assert [score.name for score in trajectory.scores] == ["thumbs"]
    assert store.verify() == []


def test_patch_does_not_wait_for_the_network(
    store: Store, url: str, upstream: StubServer, monkeypatch: pytest.MonkeyPatch
):
    """Until the server has told who serves, calls go upstream and say so; then they are routed."""
    store.ledger.add_base("agent@0", "/base", "ff", who="test")
    may_connect = threading.Event()
    connect = psycopg.connect

    def slow(*given: Any, **more: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        assert may_connect.wait(30)
        return connect(*given, **more)

    with serving() as local, openai.OpenAI(api_key="k", base_url=upstream.url, max_retries=0) as client:
        store.ledger.set_engine(local.url, who="test")
        store.close()
        monkeypatch.setattr(route_module, "_open", {})
        monkeypatch.setattr(psycopg, "connect", slow)
        monkeypatch.setattr(psycopg.Connection, "connect", slow)

        def ask(text: str) -> None:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])

        art.patch(store=url, flush_interval_s=0.01, poll_interval_s=0.05)
        try:
            ask("early")
            assert not art.status().champion
            may_connect.set()
            monkeypatch.undo()
            end = time.monotonic() + 30
            while not art.status().champion:
                assert time.monotonic() < end
                time.sleep(0.02)
            ask("late")
            assert art.flush(30)
        finally:
            art.unpatch()
    found = {c.messages[-1]["content"]: c for t in store.read.recent() for c in t.calls}
    assert found["early"].fallback == "the store's server has not told yet who serves"
    assert (found["late"].policy, found["late"].fallback) == ("agent@0", None)
    assert [len(server.seen) for server in (upstream, local)] == [1, 1]
