"""f7, s07, s05: however a process ends, it ends when it wants to, and the store stays sound.

SIGTERM with its default disposition ends a process without running any Python: what is in its spool then, the next
process takes over, and what had ended only some milliseconds before is lost.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from art_patch.recording.spooler import FIRST_MOMENTS_S
from art_patch.store import open_store
from tests.support.apps import FULL, Programs, Store
from tests.support.next_release import back_to_this_release, next_release

CALLS = """
for number in range(20):
    call(str(number))
print("done", time.time(), flush=True)
"""

WAYS = {
    "end of the program": ("", 0),
    "sys.exit": ("sys.exit(0)", 0),
    "an exception": ("raise ValueError('the app')", 1),
    "SIGTERM with a handler": (
        "signal.signal(15, lambda *_: sys.exit(5)); os.kill(os.getpid(), 15); time.sleep(60)",
        5,
    ),
    "SIGTERM": ("settle(); os.kill(os.getpid(), 15); time.sleep(60)", -signal.SIGTERM),
    "SIGINT": ("os.kill(os.getpid(), 2); time.sleep(60)", -signal.SIGINT),
    "os._exit": ("settle(); os._exit(3)", 3),
}
"""How a process ends, and its exit code. Where no Python runs at the end, the writer is given time for its batch."""

TEMPLATE = """
import json, signal, threading

call("warm")
assert art.flush(60)
print("ready", flush=True)
sys.stdin.readline()

def settle():
    end = time.monotonic() + float(sys.argv[2])
    while art.status().recorded < 20 and time.monotonic() < end:
        time.sleep(0.02)

for way, code in json.loads(sys.argv[1]).items():
    out, err = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(out[1], 1)
        os.dup2(err[1], 2)
        for number in range(20):
            if way != "bare":
                call(f"{way} {number}")
        if way == "bare":
            art.unpatch()
        os.write(1, str(time.time()).encode())
        exec(code)
        break
    for end in (out[1], err[1]):
        os.close(end)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    ended = time.time()
    said = os.read(err[0], 65536).decode()
    print(json.dumps([way, status, ended - float(os.read(out[0], 100)), said]), flush=True)
"""
"""One process imports the SDK and forks a child for each way to end."""


def end_in_all_ways(programs: Programs, figure: Any, name: str, patience_s: float, hung: bool) -> None:
    codes = {"bare": "sys.exit(0)"} | {way: code for way, (code, _) in WAYS.items()}
    with programs.start(TEMPLATE, json.dumps(codes), str(patience_s), stdin=subprocess.PIPE) as template:
        assert template.stdout is not None and template.stdout.readline() == "ready\n"
        holder = sqlite3.connect(programs.store.path, isolation_level=None)
        if hung:
            holder.execute("BEGIN IMMEDIATE")
        out, err = template.communicate(timeout=140)
        if hung:
            holder.execute("ROLLBACK")
        holder.close()
    ends = {way: rest for way, *rest in map(json.loads, out.splitlines()) if way in codes}
    assert ends.keys() == codes.keys(), err
    _, bare, _ = ends.pop("bare")
    figure(f"{name}, without us: exit took, s", round(bare, 2))
    for way, (status, delay, said) in ends.items():
        assert status == WAYS[way][1], (way, said)
        of_the_app = ["Traceback" in said, "ValueError: the app" in said, "KeyboardInterrupt" in said]
        assert of_the_app == [way in ("an exception", "SIGINT"), way == "an exception", way == "SIGINT"], (way, said)
        assert "Fatal" not in said and said.count("Traceback") <= 1
        figure(f"{name}, {way}: exit took longer by, s", round(delay - bare, 2), "<= 2")


@pytest.mark.slow
def test_f07_a_clean_exit_writes_everything(programs: Programs, store: Store, figure):
    end_in_all_ways(programs, figure, "f07", 30, hung=False)
    assert store.texts() == sorted(["warm", *(f"{way} {number}" for way in WAYS for number in range(20))])
    assert store.problems() == []
    figure("f07 calls written at a clean exit, %", 100, "100")


@pytest.mark.slow
def test_f07_s07_exit_with_a_hung_store(programs: Programs, store: Store, figure):
    """Another process holds the database; nothing can be written."""
    end_in_all_ways(programs, figure, "s07 hung store", 0.3, hung=True)
    assert store.problems() == []


IN_MEMORY = {"ART_PATCH_SPOOL_MIB": "0"}
"""Without a spool, the exit is the last chance of what waits."""

SLOW = """
from art_patch.recording import process
from art_patch.store.write import Writer

write = Writer.write
Writer.write = lambda *given: (time.sleep(1), write(*given))[1]
process.EXIT_DEADLINE_S, process.EXIT_AT_MOST_S = 2, 60
for number in range(70):  # three batches at least
    call(str(number))
print("done", time.time(), flush=True)
"""


@pytest.mark.slow
def test_f07_exit_waits_on_while_the_store_takes_what_it_is_given(programs: Programs, store: Store, figure):
    ran = programs.run(SLOW, timeout=60, env=IN_MEMORY)
    figure("f07 slow store: exit took, s", round(after(ran.out, time.time()), 2), "")
    assert (ran.code, ran.err, store.texts()) == (0, "", sorted(map(str, range(70))))


def test_f07_the_first_flush_is_at_the_exit(programs: Programs, store: Store, figure):
    """A program so short that SQLAlchemy was not even imported when it ends."""
    ran = programs.run("call('only'); print('done', time.time(), flush=True)")
    figure("f07 first flush at the exit: took, s", round(after(ran.out, time.time()), 2), "")
    assert (ran.code, ran.err, store.texts()) == (0, "", ["only"])


SLOW_IMPORTS = """
from art_patch.recording import process

process.EXIT_DEADLINE_S, process.EXIT_AT_MOST_S = 1, 60

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("alembic", "mako", "sqlalchemy") or name.startswith("art_patch.store"):
            time.sleep(0.05)

sys.meta_path.insert(0, Finder())
call("only")
"""

SLOW_STATEMENTS = """
from sqlalchemy import Engine, event

from art_patch.recording import process

process.EXIT_DEADLINE_S, process.EXIT_AT_MOST_S = 3, 60
event.listen(Engine, "before_cursor_execute", lambda *_: time.sleep(0.1))
call("only")
"""


@pytest.mark.parametrize("code", [SLOW_IMPORTS, SLOW_STATEMENTS], ids=["imports", "statements"])
@pytest.mark.parametrize("kind", ["new", "old"])
def test_f07_exit_waits_on_while_the_store_is_being_opened(programs: Programs, store: Store, code, kind, tmp_path):
    """Each import and each table or migration is a step; all of them take longer than the exit waits for one."""
    start = {"env": IN_MEMORY}
    if kind == "old":
        open_store(store.url).close()
        start["cwd"] = next_release(tmp_path)
    ran = programs.run(code, timeout=100, **start)
    if kind == "old":
        back_to_this_release(store.path)
    assert (ran.code, ran.err, store.texts()) == (0, "", ["only"])
    assert store.problems() == []


def test_f07_a_store_that_a_killed_process_had_only_begun(programs: Programs, store: Store):
    store.path.parent.mkdir()
    connection = sqlite3.connect(store.path)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.close()
    assert store.path.stat().st_size == 4096
    ran = programs.run("call('only')")
    assert (ran.code, ran.err, store.texts()) == (0, "", ["only"])
    assert store.problems() == []


def after(out: str, ended: float) -> float:
    return ended - float(out.split()[1])


TOO_SLOW = (
    "the store had not taken it all when the exit stopped waiting; call art_patch.flush(60) before the program ends"
)


@contextmanager
def held_and_stopped(programs: Programs) -> Iterator[None]:
    """Another process holds the store's lock, and does nothing any more."""
    hold = "import fcntl; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True)"
    path = programs.store.path
    path.parent.mkdir()
    with programs.start(hold + "\ntime.sleep(100)", f"{path}.lock", prelude="import sys, time\n") as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        os.kill(holder.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            holder.kill()


def test_f07_s07_exit_while_another_process_holds_our_lock_and_stops(programs: Programs, figure):
    with held_and_stopped(programs):
        for env, said in ((IN_MEMORY, f"art_patch: 20 calls not recorded, because {TOO_SLOW}\n"), ({}, "")):
            ran = programs.run(CALLS, timeout=60, env=env)
            delay = after(ran.out, time.time())
            assert (ran.code, ran.err) == (0, said)
            figure(f"s07 our lock held by a stopped process, {env}: exit took, s", round(delay, 2), "<= 2")
    assert programs.store.texts() == sorted(str(number) for number in range(20))  # from the spool


KILLED = """
import random, signal
ACK = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def work(me):
    number = 0
    while True:
        number += 1
        texts = [f"{me} {number} {i}" for i in range(5)]
        for text in texts:
            call(text)
        os.write(ACK, "".join(f"sent {text}\\n" for text in texts).encode())
        if art.flush(30):
            os.write(ACK, "".join(f"ack {text}\\n" for text in texts).encode())

call("warm")
assert art.flush(60)
random.seed(int(sys.argv[3]))
for round_ in range(int(sys.argv[2]) // 4):
    children = []
    for place in range(4):
        child = os.fork()
        if child == 0:
            work(f"{round_} {place}")
        children.append(child)
    time.sleep(0.25)
    random.shuffle(children)
    for child in children:
        time.sleep(random.uniform(0.02, 0.3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
"""


@pytest.mark.slow
def test_s05_kill_minus_9(programs: Programs, store: Store, tmp_path: Any, figure):
    """Four processes write, each is killed at a random moment. What `flush()` said yes to is in the store."""
    kills = 200 if FULL else 20
    log = tmp_path / "acknowledged"
    ran = programs.run(KILLED, str(log), str(kills), str(random.randrange(1000)), timeout=280)
    assert ran.code == 0, ran.err
    lines = log.read_text().splitlines()
    acknowledged = {line[4:] for line in lines if line.startswith("ack ")}
    sent = {line[5:] for line in lines if line.startswith("sent ")}
    texts = store.texts()
    lost = acknowledged - set(texts)
    assert acknowledged
    assert lost == set()
    assert len(texts) == len(set(texts))
    assert store.problems() == []
    figure(f"s05 kill -9 x {kills}, 4 processes: corrupt, torn, acknowledged lost", "0, 0, 0", "0, 0, 0")
    figure("s05 calls acknowledged; sent, unacknowledged and lost", f"{len(acknowledged)}; {len(sent - set(texts))}")


LOST_IN_ALL_WAYS = """
call("x" * 700_000)
call("y" * 700_000)
call("z" * 700_000)
with art.trajectory("named"):
    call("small")
"""


def test_f07_all_that_is_lost_is_said_with_its_causes(programs: Programs):
    with held_and_stopped(programs):
        ran = programs.run(LOST_IN_ALL_WAYS, env={"ART_PATCH_QUEUE_MIB": "1"} | IN_MEMORY)
    full = "the queue was full; raise queue_mib (ART_PATCH_QUEUE_MIB)"
    line = f"2 calls not recorded, because {full}. 2 calls and 1 other record not recorded, because {TOO_SLOW}"
    assert (ran.code, ran.err) == (0, f"art_patch: {line}\n")


SHORT = """
began = time.monotonic()
call("only")
while time.monotonic() - began < 0.15:
    time.sleep(0.01)
print("art_patch.recording.converting" in sys.modules, time.monotonic() - began)
"""


def test_f07_a_short_process_is_spared_the_imports_of_the_recorder(programs: Programs, store: Store):
    for _ in range(10):
        imported, took_s = programs.run(SHORT).out.split()
        if float(took_s) < FIRST_MOMENTS_S:
            break
    else:
        pytest.skip("this machine was too slow ten times to look within the first moments")
    assert imported == "False"
    assert "only" in store.texts()


HELD_UP = """
import signal
call("first")
with art.trajectory("talk", user_id="u"):
    call("before, written")
    assert art.flush(30)
    print("written")
    if input() == "held":
        call("before, unwritten")
    os.kill(os.getpid(), signal.SIGSTOP)
    call("after")
"""


@pytest.mark.parametrize("store_is", ["free", "held"])
def test_f07_what_a_process_holds_when_its_user_is_erased_does_not_come_back(
    programs: Programs, store: Store, store_is: str
):
    app = programs.start(HELD_UP, stdin=subprocess.PIPE)
    assert app.stdin is not None and app.stdout is not None
    assert app.stdout.readline() == "written\n"
    with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
        if store_is == "held":
            other.execute("BEGIN IMMEDIATE")  # so the app's next call waits in its spool
        app.stdin.write(store_is + "\n")
        app.stdin.flush()
        os.waitid(os.P_PID, app.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    with store.opened() as opened:
        assert opened.rights.erase(user="u").calls == 1
    app.send_signal(signal.SIGCONT)
    out, err = app.communicate(timeout=60)
    assert (app.returncode, out, err) == (0, "", "")
    assert store.texts() == ["after", "first"]
    with store.opened() as opened:
        runs = opened.read.recent(limit=10)
    assert {(run.info.name, run.info.user_id) for run in runs} == {(None, None), ("talk", "u")}
    assert store.problems() == []


def test_f07_it_is_said_when_the_store_cannot_be_made(programs: Programs, unusable: str):
    ran = programs.run(CALLS, env={"ART_PATCH_STORE": unusable})
    assert ran.code == 0
    assert ran.err.splitlines() == [
        "art_patch: FileExistsError in recording.spool: the app is not affected (1 so far); cause: File exists",
        f"art_patch: 20 calls not recorded, because {UNUSABLE}",
    ]


UNUSABLE = "the store cannot be written (StoreError); `art-patch doctor` says why"


@pytest.fixture
def unusable(tmp_path: Path) -> str:
    """The URL of a store that cannot be made."""
    tmp_path.joinpath("file").write_text("")
    return f"sqlite:///{tmp_path}/file/store.db"


AT_EXIT = """
import atexit

atexit.register(lambda: call("late"))  # before the first call, so it runs after what that call registers
call("early")
"""


def test_f07_calls_of_the_apps_own_exit_handlers_are_recorded(programs: Programs, store: Store):
    ran = programs.run(AT_EXIT)
    assert (ran.code, ran.err, store.texts()) == (0, "", ["early", "late"])


AT_FINALISATION = """
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "sqlalchemy":
            time.sleep(0.05)

class Late:
    def __del__(self):
        import sqlalchemy.orm

sys.meta_path.insert(0, Finder())
late = Late()  # ends when the interpreter goes down
call("only")
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize("delay_s", ["0", "0.15", "0.4"])
def test_f07_a_finaliser_that_imports_what_the_recorder_imports_does_not_hang(
    programs: Programs, store: Store, delay_s
):
    ran = programs.run(AT_FINALISATION, delay_s)
    assert (ran.code, ran.err, store.texts()) == (0, "", ["only"])


def test_f07_calls_of_the_apps_own_exit_handlers_are_counted_when_they_are_lost(programs: Programs, unusable: str):
    ran = programs.run(AT_EXIT, env={"ART_PATCH_STORE": unusable})
    assert ran.code == 0
    assert ran.err.splitlines()[-1] == f"art_patch: 2 calls not recorded, because {UNUSABLE}"


IMPORTS = """
import threading, types

from art_patch.recording import process

process.EXIT_AT_MOST_S = 600

def keep_importing():
    for number in range(1_000_000):
        sys.modules[f"module_{number}"] = types.ModuleType(f"module_{number}")
        time.sleep(0.01)

threading.Thread(target=keep_importing, daemon=True).start()
call("only")
"""


def test_f07_what_the_app_imports_is_no_progress_of_a_store_that_cannot_be_written(programs: Programs, unusable: str):
    ran = programs.run(IMPORTS, env={"ART_PATCH_STORE": unusable}, timeout=60)
    assert ran.code == 0
    assert ran.err.splitlines()[-1] == f"art_patch: 1 call not recorded, because {UNUSABLE}"


WORKERS = """
import multiprocessing

def work():
    call("child")

if __name__ == "__main__":
    import logging
    logging.getLogger("art_patch").setLevel(logging.ERROR)
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(60)
    print(child.exitcode)
"""


def test_f07_workers_say_it_too(programs: Programs, unusable: str):
    ran = programs.run(WORKERS, env={"ART_PATCH_STORE": unusable})
    assert (ran.code, ran.out) == (0, "0\n")
    assert ran.err.splitlines() == [f"art_patch: 1 call not recorded, because {UNUSABLE}"]


@pytest.mark.parametrize("how", ["sys.stderr = None", "sys.stderr.close()", "os.close(2)"])
def test_f07_without_a_stderr_nothing_is_said_and_nothing_happens(programs: Programs, unusable: str, how):
    quiet = "import logging; logging.getLogger('art_patch').setLevel(logging.ERROR)\n"
    ran = programs.run(f"{quiet}call()\n{how}", env={"ART_PATCH_STORE": unusable})
    assert (ran.code, ran.err) == (0, "")


def test_the_app_itself_decides_about_signals(programs: Programs):
    code = "import signal; print(signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))"
    bare = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert programs.run("call()\n" + code).out == bare
