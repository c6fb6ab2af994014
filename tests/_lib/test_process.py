"""Children: they end in order, with everything that they started, and learn of our own end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from art_patch._lib.process import Child, end_of_log, is_alive, open_log, own_name, started_at

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
time.sleep(60)
"""
WATCHING = """
import os, time
from art_patch._lib.process import when_parent_ends
when_parent_ends(lambda: os._exit(7))
print("up", flush=True)
time.sleep(60)
"""
NEEDS_PROC = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")


def python(code: str) -> Child:
    return Child([sys.executable, "-c", code], os.environ)


def read_line(child: Child) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def test_a_child_that_obeys_ends_by_sigterm():
    child = python("print('up', flush=True); import time; time.sleep(60)")
    assert read_line(child) == "up"
    child.stop(grace_s=30)
    child.stop(grace_s=30)
    assert child.returncode == -15


@NEEDS_PROC
def test_a_child_that_ignores_sigterm_ends_with_what_it_started():
    child = python(STUBBORN)
    grandchild = int(read_line(child))
    assert started_at(grandchild) is not None
    child.stop(grace_s=0.05)
    assert child.returncode == -9
    deadline = time.monotonic() + 10
    while started_at(grandchild) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert started_at(grandchild) is None


def test_a_child_learns_that_its_parent_has_ended():
    child = python(WATCHING)
    assert read_line(child) == "up"
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(30) == 7
    child.stop(grace_s=0)


@NEEDS_PROC
def test_a_name_means_one_process_and_no_later_one_with_its_id():
    assert is_alive(own_name())
    assert not is_alive(f"{os.getpid()}-1")
    assert not is_alive("999999999-1")
    assert not is_alive("no process")
    with subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE) as ended:
        name = f"{ended.pid}-{started_at(ended.pid) or 'ended'}"
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie: its id is still taken
        assert not is_alive(name)


def test_the_end_of_a_log_begins_where_asked(tmp_path: Path):
    log = tmp_path / "logs" / "a.log"
    with open_log(log) as file:
        file.write(b"yesterday\n")
        start = file.tell()
    with open_log(log) as file:
        file.write(b"today \xff\n")
    assert end_of_log(log, 1000) == "yesterday\ntoday \ufffd"
    assert end_of_log(log, 1000, start=start) == "today \ufffd"
    assert end_of_log(log, 3) == "\ufffd"
