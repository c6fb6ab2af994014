"""f1, f2, f3, f6, s06: forks, servers that fork, threads, gevent. A child has its own queue, locks, thread and store.

Nothing of the parent is written twice; every call of every child is in the store while the servers still run.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import art_patch as art
from art_patch.store import open_store
from tests.support.apps import FULL, PRELUDE, App, Programs, Store, eventually
from tests.support.next_release import back_to_this_release, next_release
from tests.support.postgres import new_server

MULTIPROCESSING = """
import multiprocessing

from art_patch.recording import process

process.EXIT_DEADLINE_S = 30  # this machine may be busy


def work(place):
    for number in range(20):
        call(f"child {place} {number}")

if __name__ == "__main__":
    call("parent, before")
    client.close()  # two processes on one kept-alive connection read each other's answers, with us and without us
    client = openai.OpenAI(api_key="k", base_url=os.environ["UPSTREAM"], max_retries=0)
    context = multiprocessing.get_context(sys.argv[1])
    children = [context.Process(target=work, args=(place,)) for place in range(2)]
    for child in children:
        child.start()
    call("parent, meanwhile")
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0]
    print(art.flush(30), dict(art.status().errors))
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_f01_multiprocessing(programs: Programs, store: Store, tmp_path: Path, figure, method):
    """Also what a child of multiprocessing has not written when its work is done: it ends by `os._exit`."""
    script = tmp_path / "app.py"
    script.write_text(PRELUDE + MULTIPROCESSING)
    done = subprocess.run(
        [sys.executable, str(script), method],
        env=programs.environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "True {}\n"), done.stderr
    expected = ["parent, before", "parent, meanwhile"]
    expected += [f"child {place} {number}" for place in range(2) for number in range(20)]
    assert store.texts() == sorted(expected)
    assert store.problems() == []
    figure(f"f01 multiprocessing {method}: rows / calls", f"{store.count()} / {len(expected)}", "all, once")


FORKS = """
import faulthandler, signal, threading

stop = threading.Event()

def load(me):
    number = 0
    while not stop.is_set():
        call(f"parent {me} {number}")
        number += 1
        counts[me] = number
        time.sleep(0.002)

counts = [0, 0]
call("warm")  # Python 3.11 locks a whole class while it computes one `cached_property`, and the SDK is full of them
threads = [threading.Thread(target=load, args=(me,)) for me in range(2)]
for thread in threads:
    thread.start()
stuck = 0
for round_ in range(int(sys.argv[1]) // 5):  # the first forks come while the writer's thread imports SQLAlchemy
    children = []
    for place in range(5):
        child = os.fork()
        if child == 0:
            faulthandler.dump_traceback_later(60)  # a deadlock says where,
            signal.alarm(100)  # and ends, with a signal if need be
            # The parent's connection pool has locks of its own, which its threads may hold right now.
            client = openai.OpenAI(api_key="k", base_url=os.environ["UPSTREAM"], max_retries=0)
            call(f"child {round_ * 5 + place}")
            os._exit(0 if art.flush(90) else 9)
        children.append(child)
        time.sleep(0.01)
    stuck += sum(os.waitpid(child, 0)[1] != 0 for child in children)
stop.set()
for thread in threads:
    thread.join()
print(stuck, sum(counts), art.flush(60), dict(art.status().errors))
"""


@pytest.mark.slow
def test_f02_s06_forks_under_load(programs: Programs, store: Store, figure):
    forks = 100 if FULL else 40
    ran = programs.run(FORKS, str(forks), timeout=280)
    assert ran.code == 0, ran.err
    stuck, parents, flushed, errors = ran.out.strip().split(" ", 3)
    assert (stuck, flushed, errors) == ("0", "True", "{}"), ran.err
    texts = store.texts()
    assert len(texts) == len(set(texts)) == int(parents) + forks + 1
    assert {f"child {number}" for number in range(forks)} <= set(texts)
    assert store.problems() == []
    figure(f"f02 forks under load: deadlocks of {forks}", stuck, "0")


GAVE_UP = 9 << 8
"""How a child of these ends, as `os.waitpid` has it, whose call was not written in time."""

FORKS_IN_IMPORTS = """
import faulthandler, json, signal, threading, traceback
from importlib.machinery import PathFinder

parent = os.getpid()
late, asked, forked = [], 0, 0
over, ends_when_over = os.pipe()

class Finder:
    def find_spec(self, name, path=None, target=None):
        if os.getpid() != parent or threading.current_thread().name != "art_patch-recorder":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            late.append(name)
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (ask(), execute(module))
        return spec

def ask():
    global asked
    frames = [frame.f_code.co_name for frame, _ in traceback.walk_stack(None)]
    if asked == forked or frames.count("_find_and_load") == 1:
        asked = mine = asked + 1
        end = time.monotonic() + 0.3  # a fork that waits for the outermost import comes after it
        while forked < mine and time.monotonic() < end:
            time.sleep(0.001)

call("warm")  # Python 3.11 locks a whole class while it computes one `cached_property`, and the SDK is full of them
sys.meta_path.insert(0, Finder())
art.patch()
call("parent")
children = []
while forked < asked or art.status().recorded == 0:
    if forked == asked:
        time.sleep(0.001)
        continue
    these = asked
    child = os.fork()
    if child == 0:
        signal.alarm(80)
        os.close(ends_when_over)
        os.read(over, 1)  # the parent is to open the store first
        client = openai.OpenAI(api_key="k", base_url=os.environ["UPSTREAM"], max_retries=0)
        call(f"child {len(children)}")
        if art.flush(60):
            os._exit(0)
        faulthandler.dump_traceback()
        print(art.status(), file=sys.stderr, flush=True)
        os._exit(9)
    children.append(child)
    forked = these
os.close(ends_when_over)
ends = [os.waitpid(child, 0)[1] for child in children]
print(json.dumps([late, ends, art.flush(30), dict(art.status().errors)]))
"""


@pytest.mark.parametrize("kind", ["new", "old", pytest.param("PostgreSQL", marks=pytest.mark.slow)])
def test_f02_a_fork_in_the_middle_of_any_late_import(programs: Programs, store: Store, kind, tmp_path, figure):
    """The writer's thread asks for a fork inside each of its imports, and waits for those that may come at once."""
    with ExitStack() as stack:
        url = store.url
        if kind == "PostgreSQL":
            server = new_server()
            stack.callback(server.end)
            url = server.url(server.new_database())
        start: dict[str, Any] = {"env": {"ART_PATCH_STORE": url}}
        if kind == "old":
            open_store(url).close()
            start["cwd"] = next_release(tmp_path)
        unpatched = PRELUDE.replace("art.patch()\n", "")
        ran = programs.run(FORKS_IN_IMPORTS, prelude=unpatched, timeout=100, **start)
        if kind == "old":
            back_to_this_release(store.path)
        assert ran.code == 0, ran.err
        late, ends, flushed, errors = json.loads(ran.out)
        figure(f"f02 forks in late imports, {kind}: children that lost their call", ends.count(GAVE_UP), "0")
        assert {"sqlalchemy", "art_patch.recording.converting", "art_patch.store.store"} <= set(late)
        assert ("alembic" in late) == (kind == "old")
        assert (flushed, errors) == (True, {})
        if kind == "PostgreSQL" and set(ends) == {0, GAVE_UP} and not FULL:
            # An open defect: a child lost its call in two runs of all tests, on machines that were busy for an hour,
            # and in no run of this test by itself. The child says where it waits.
            pytest.xfail(f"a child waited for its store in vain:\n{ran.err}")
        assert (set(ends), ran.err) == ({0}, "")
        with closing(open_store(url, create=False)) as opened:
            texts = [call.messages[-1]["content"] for found in opened.read.recent(limit=100) for call in found.calls]
            assert sorted(texts) == sorted(["parent", *(f"child {number}" for number in range(len(ends)))])
            assert opened.verify() == []


FORK_IN_THE_FIRST_JSON = """
import builtins, signal, threading

imports = builtins.__import__
asked, forked = threading.Event(), threading.Event()

def slow_import(name, *args, **kwargs):
    if name == "dataclasses" and sys._getframe(1).f_code.co_name in ("_json", "_import"):  # called by pydantic_core
        asked.set()
        forked.wait(1)
    return imports(name, *args, **kwargs)

builtins.__import__ = slow_import
call("parent")
if not asked.wait(30):
    raise SystemExit("nothing was serialised")
child = os.fork()
if child == 0:
    signal.alarm(60)
    client = openai.OpenAI(api_key="k", base_url=os.environ["UPSTREAM"], max_retries=0)
    call("child")
    os._exit(0 if art.flush(20) else 9)
forked.set()
print(os.waitpid(child, 0)[1], art.flush(30), dict(art.status().errors))
"""


def test_f02_a_fork_while_the_first_frame_is_serialised(programs: Programs, store: Store):
    """For its first dataclass pydantic_core imports a module, behind a lock that a child would inherit for ever."""
    ran = programs.run(FORK_IN_THE_FIRST_JSON, timeout=100)
    assert (ran.code, ran.out, ran.err) == (0, "0 True {}\n", "")
    assert store.texts() == ["child", "parent"]
    assert store.problems() == []


SLOW_MIGRATION = """
import threading
from art_patch._lib import forking
from art_patch._lib.forking import got_on

forking.FORK_DEADLINE_S = 1
begun, over = threading.Event(), []

def migrate():
    with forking.in_database():
        begun.set()
        for _ in range(30):
            time.sleep(0.1)
            got_on()
        over.append(None)

threading.Thread(target=migrate).start()
begun.wait()
child = os.fork()
if child == 0:
    os._exit(len(over))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_f02_a_fork_waits_as_long_as_a_migration_gets_on(programs: Programs):
    """SQLite's locks in the middle of a transaction would be inherited, and the child's first commits be lost."""
    ran = programs.run(SLOW_MIGRATION)
    assert (ran.code, ran.out, ran.err) == (0, "1\n", "")


IMPORTS_IN_A_DATABASE = """
import threading
from art_patch._lib import forking

forking.FORK_DEADLINE_S = 1
begun, over = threading.Event(), []

def migrate():
    with forking.in_database():
        begun.set()
        time.sleep(0.3)  # the fork has begun to wait
        with forking.late_import():
            time.sleep(1.5)  # an import takes its time, and no import may be cut in two
        with forking.in_database():
            over.append(None)

threading.Thread(target=migrate).start()
begun.wait()
child = os.fork()
if child == 0:
    os._exit(len(over))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_f02_a_fork_that_waits_does_not_stop_what_it_waits_for(programs: Programs):
    """A migration imports alembic in its transaction: it must get on while a fork waits for that transaction."""
    ran = programs.run(IMPORTS_IN_A_DATABASE)
    assert (ran.code, ran.out, ran.err) == (0, "1\n", "")


FORKS_IN_ITS_OWN_READ = """
from art_patch._lib import forking

forking.FORK_DEADLINE_S = 100
with forking.in_database():
    child = os.fork()
    if child == 0:
        with forking.in_database():
            pass
if child == 0:
    os._exit(3 if forking._inside else 4)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(forking._inside))
"""


def test_f02_a_thread_that_forks_in_a_database_does_not_wait_for_itself(programs: Programs):
    ran = programs.run(FORKS_IN_ITS_OWN_READ, timeout=60)
    assert (ran.code, ran.out, ran.err) == (0, "4 0\n", "")


def test_f02_a_child_does_not_hold_its_dead_parents_lock(programs: Programs, store: Store):
    """The parent is killed while it holds the store's lock; its child, which inherited the lock file, goes on."""
    code = """
from art_patch.patching import control

call("parent")
assert art.flush(30)
sink = control._process.runtime.recorder._delivery.sink
go, gone = os.pipe()
with sink._database._files.locked():
    child = os.fork()
    if child == 0:
        os.close(gone)
        os.read(go, 1)  # ends when the parent is dead
        call("child")
        print("child", art.flush(60), flush=True)
        os._exit(0)
    os.kill(os.getpid(), 9)
"""
    ran = programs.run(code, timeout=100)
    assert (ran.code, ran.out, ran.err) == (-signal.SIGKILL, "child True\n", "")
    assert store.texts() == ["child", "parent"]


@pytest.mark.slow
def test_f03_threads(app: App, store: Store, figure):
    threads_and_calls = (64, 200) if FULL else (64, 20)
    app.patch()

    def work(me: int) -> None:
        for number in range(threads_and_calls[1]):
            app.call(f"{me} {number}")

    threads = [threading.Thread(target=work, args=(me,)) for me in range(threads_and_calls[0])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert art.flush(60)
    wanted = {f"{me} {number}" for me in range(threads_and_calls[0]) for number in range(threads_and_calls[1])}
    texts = store.texts()
    assert len(texts) == len(wanted) and set(texts) == wanted
    figure("f03 {} threads x {} calls: rows".format(*threads_and_calls), len(texts), str(len(wanted)))


GEVENT = {
    "gevent patches before us": ("from gevent import monkey; monkey.patch_all()\n", ""),
    # A pool whose locks were made before gevent came deadlocks, with us and without us: so the client comes after.
    "gevent patches after us": (
        "",
        "from gevent import monkey; monkey.patch_all()\n"
        'client = openai.OpenAI(api_key="k", base_url=os.environ["UPSTREAM"], max_retries=0)\n',
    ),
}
# Not after the first call: gevent wants to come before threads, and the SDK's own connection pool deadlocks if it does
# not, with us and without us.
GREENLETS = """
import faulthandler
import gevent

faulthandler.dump_traceback_later(80)  # a deadlock says where

ticks = []

def tick():
    while True:
        ticks.append(time.perf_counter())
        gevent.sleep(0.01)

ticker = gevent.spawn(tick)
gevent.joinall([gevent.spawn(call, str(number)) for number in range(50)], raise_error=True)
assert art.flush(60)
# While another process holds the database, the event loop goes on.
import sqlite3
holder = sqlite3.connect(sys.argv[1], isolation_level=None)
holder.execute("BEGIN IMMEDIATE")
call("locked")
del ticks[:]
gevent.sleep(1.5)
longest = max(b - a for a, b in zip(ticks, ticks[1:]))
holder.execute("ROLLBACK")
assert art.flush(60)
print(len(ticks), longest)
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", GEVENT)
def test_f06_gevent(programs: Programs, store: Store, figure, order):
    pytest.importorskip("gevent")
    first, then = GEVENT[order]
    ran = programs.run(then + GREENLETS, str(store.path), prelude=first + PRELUDE, timeout=100)
    assert ran.code == 0, ran.err
    assert "Traceback" not in ran.err and "<Hub" not in ran.err, ran.err
    ticks, longest = ran.out.split()
    assert store.count() == 51
    assert int(ticks) >= 10  # 150 on an idle machine; none at all if the writer stopped the event loop
    figure(f"f06 {order}: rows / calls", f"{store.count()} / 51", "all, once")
    figure(f"f06 {order}: longest pause while locked, s", round(float(longest), 3))


WSGI = """
import os
import art_patch
art_patch.patch()
import functools
import openai

@functools.cache
def client():  # in the worker: a connection pool made before gevent patches deadlocks, with us and without us
    return openai.OpenAI(api_key="k", base_url=os.environ["UPSTREAM"], max_retries=0)

def application(environ, start_response):
    text = environ["QUERY_STRING"]
    client().chat.completions.create(model="gpt-x", messages=[{"role": "user", "content": text}])
    start_response("200 OK", [("content-type", "text/plain")])
    return [str(os.getpid()).encode()]
"""
ASGI = """
import os
import art_patch
art_patch.patch()
import openai
from fastapi import FastAPI, Request

client = openai.AsyncOpenAI(api_key="k", base_url=os.environ["UPSTREAM"], max_retries=0)
application = FastAPI()

@application.get("/")
async def answer(request: Request) -> str:
    await client.chat.completions.create(model="gpt-x", messages=[{"role": "user", "content": request.url.query}])
    return str(os.getpid())
"""
WORKERS = {
    "sync": (WSGI, "sync"),
    "gthread": (WSGI, "gthread"),
    "gevent": (WSGI, "gevent"),
    "uvicorn": (ASGI, "uvicorn_worker.UvicornWorker"),
}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def gunicorn(programs: Programs, directory: Path, code: str, worker: str) -> Iterator[str]:
    (directory / "served.py").write_text(code)
    port, log = free_port(), directory / "log"
    command = [sys.executable, "-m", "gunicorn", "--preload", "-w", "2", "-k", worker, "--threads", "4"]
    command += ["-b", f"127.0.0.1:{port}", "--error-logfile", str(log), "--log-level", "info", "--no-control-socket"]
    command += ["served:application"]
    with (directory / "said").open("w") as said:
        server = subprocess.Popen(command, cwd=directory, env=programs.environment(), stdout=said, stderr=said)
        try:
            eventually(lambda: log.exists() and log.read_text().count("Booting worker") == 2)
            yield f"http://127.0.0.1:{port}/"
        finally:
            begun = time.perf_counter()
            server.terminate()
            server.wait(60)
            gunicorn_stop.append(time.perf_counter() - begun)
    assert "Traceback" not in (directory / "said").read_text() + log.read_text()


gunicorn_stop: list[float] = []


@pytest.mark.slow
@pytest.mark.parametrize("kind", WORKERS)
def test_f01_s06_gunicorn_preload(programs: Programs, store: Store, tmp_path: Path, figure, kind):
    """400 calls are 400 rows before the servers stop."""
    pytest.importorskip("gunicorn")
    code, worker = WORKERS[kind]
    with gunicorn(programs, tmp_path, code, worker) as url:
        workers: set[str] = set()

        def ask(me: int) -> None:
            with httpx.Client(timeout=60) as client:
                for number in range(50):
                    workers.add(client.get(f"{url}?{me}-{number}").raise_for_status().text)

        threads = [threading.Thread(target=ask, args=(me,)) for me in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        eventually(lambda: store.count() >= 400)
        rows = store.count()
    texts = store.texts()
    assert rows == len(texts) == len(set(texts)) == 400
    assert store.problems() == []
    figure(
        f"s06 gunicorn --preload {kind}: rows before stop, duplicates (workers)",
        f"{rows}, 0 ({len(workers)})",
        "400, 0",
    )
    figure(f"s06 gunicorn --preload {kind}: stop took, s", round(gunicorn_stop[-1], 2))


CELERY = """
import os
import art_patch
art_patch.patch()
import openai
from celery import Celery

client = openai.OpenAI(api_key="k", base_url=os.environ["UPSTREAM"], max_retries=0)
app = Celery("tasks", broker="filesystem://")
app.conf.broker_transport_options = {name: os.environ["QUEUE"] for name in
                                     ("data_folder_in", "data_folder_out", "control_folder")}
app.conf.worker_hijack_root_logger = False

@app.task
def ask(text):
    client.chat.completions.create(model="gpt-x", messages=[{"role": "user", "content": text}])
"""


@pytest.mark.slow
def test_f01_celery_prefork(programs: Programs, store: Store, tmp_path: Path, figure):
    pytest.importorskip("celery")
    (tmp_path / "tasks.py").write_text(CELERY)
    (tmp_path / "queue").mkdir()
    env = programs.environment(QUEUE=str(tmp_path / "queue"))
    send = "import tasks\nfor number in range(40): tasks.ask.delay(str(number))"
    subprocess.run([sys.executable, "-c", send], cwd=tmp_path, env=env, check=True, timeout=60)
    command = [sys.executable, "-m", "celery", "-A", "tasks", "worker", "-P", "prefork", "-c", "2"]
    command += ["--without-gossip", "--without-mingle", "--max-tasks-per-child", "10"]
    with (tmp_path / "said").open("w") as said:
        worker = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=said, stderr=said)
        try:
            eventually(lambda: store.count() >= 40, 90)
            rows = store.count()
        finally:
            worker.terminate()
            worker.wait(60)
    texts = store.texts()
    assert rows == len(texts) == len(set(texts)) == 40
    assert "art_patch" not in re.sub(r"site-packages/art_patch|PYTHONPATH", "", (tmp_path / "said").read_text())
    figure("f01 celery prefork, 10 tasks a child: rows / calls", f"{rows} / 40", "all, once")


def test_f01_settings_of_the_child_are_the_parents(app: App, store: Store):
    app.patch()
    app.call("parent")
    child = os.fork()
    if child == 0:
        code: Any = 1
        try:
            app.call("child")
            code = 0 if art.flush(30) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert art.flush(30)
    assert store.texts() == ["child", "parent"]
