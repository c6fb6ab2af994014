"""f7, s07, s05: however a process ends, it ends when it wants to, and the store stays sound.

SIGTERM with its default disposition ends a process without running any Python: what the writer had not yet collected
(one `flush_interval_s`) is lost then, as with any library that does not take an app's signals into its own hands.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from typing import Any

import pytest

from tests.faults.conftest import FULL, Programs, Store

CALLS = """
for number in range(20):
    call(str(number))
print("done", time.time(), flush=True)
"""

WAYS = {
    "end of the program": ("", 0),
    "sys.exit": ("sys.exit(0)", 0),
    "an exception": ("raise SystemExit(7)", 7),
    "SIGTERM with a handler": (
        "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); os.kill(os.getpid(), 15); time.sleep(60)",
        5,
    ),
    "SIGTERM": ("time.sleep(0.5); os.kill(os.getpid(), 15); time.sleep(60)", -signal.SIGTERM),
    "SIGINT": ("import signal, threading; os.kill(os.getpid(), 2); time.sleep(60)", -signal.SIGINT),
    "os._exit": ("time.sleep(0.5); os._exit(3)", 3),
}
"""How a program ends, and its exit code. The last kinds get half a second for the writer's next batch."""


def after(out: str, took_until: float) -> float:
    return took_until - float(out.split()[1])


@pytest.mark.parametrize("way", WAYS)
def test_f07_a_clean_exit_writes_everything(programs: Programs, store: Store, figure, way):
    code, expected = WAYS[way]
    ran = programs.run(CALLS + code)
    delay = after(ran.out, time.time())
    assert ran.code == expected, ran.err
    assert ("Traceback" in ran.err) == (way == "SIGINT"), ran.err
    assert "art_patch" not in ran.err
    assert store.texts() == sorted(map(str, range(20)))
    assert store.problems() == []
    figure(f"f07 {way}: calls written of 20; exit took, s", f"{store.count()}; {delay:.2f}", "20; <= 2")


@pytest.mark.parametrize("way", WAYS)
def test_f07_s07_exit_with_a_hung_store(programs: Programs, store: Store, figure, way):
    """Another process holds the database; nothing of it can be written."""
    code, expected = WAYS[way]
    programs.run("call('first')")
    holder = sqlite3.connect(store.path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    ran = programs.run(CALLS + code, timeout=20)
    delay = after(ran.out, time.time())
    assert ran.code == expected, ran.err
    assert ("Traceback" in ran.err) == (way == "SIGINT"), ran.err
    assert "Fatal" not in ran.err
    holder.execute("ROLLBACK")
    holder.close()
    assert store.problems() == []
    figure(f"s07 hung store, {way}: exit took, s", round(delay, 2), "<= 2")


def test_f07_s07_exit_while_another_process_holds_our_lock_and_stops(programs: Programs, store: Store, figure):
    hold = "import fcntl; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True)"
    store.path.parent.mkdir()
    with programs.start(hold + "\ntime.sleep(60)", f"{store.path}.lock", prelude="import sys, time\n") as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        os.kill(holder.pid, signal.SIGSTOP)
        ran = programs.run(CALLS, timeout=20)
        delay = after(ran.out, time.time())
        holder.kill()
    assert (ran.code, ran.err) == (0, "")
    figure("s07 our lock held by a stopped process: exit took, s", round(delay, 2), "<= 2")


KILLED = """
import json, random, signal, threading
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
    kills = 200 if FULL else 32
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


def test_f07_nothing_is_said_at_exit_when_the_store_cannot_be_made(programs: Programs, store: Store):
    store.path.parent.parent.joinpath("file").write_text("")
    ran = programs.run(CALLS, env={"ART_PATCH_STORE": f"sqlite:///{store.path.parent.parent}/file/store.db"})
    assert ran.code == 0
    assert ran.err.splitlines() == ["art_patch: StoreError in store.write: the app is not affected (1 so far)"]


def test_the_app_itself_decides_about_signals(programs: Programs):
    code = "import signal; print(signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))"
    bare = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert programs.run("call()\n" + code).out == bare
