"""One cycle at a time: who holds the lease, who is gone, and what a clock that jumps does to it: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import pytest

from art_patch._lib.process import Owner, lives, owning
from art_patch.errors import Busy
from art_patch.pipeline.running_cycle import LEASE, exclusive_cycle, project_lock
from art_patch.store import Lease, Store, open_store
from art_patch.types import TrajectoryInfo

DAY_S = 86_400.0
NOW = 1e9
ELSEWHERE = Owner("x", "elsewhere", 1, "another boot", "1")

HOLD = """
import sys, time
from pathlib import Path
from art_patch.pipeline.running_cycle import exclusive_cycle
from art_patch.store import open_store

with exclusive_cycle(open_store(sys.argv[1]), Path(sys.argv[2]), who="child"):
    print("holding", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(f"sqlite:///{tmp_path}/store.db")
    yield opened
    opened.close()


@contextmanager
def another_process(store_url: str, directory: Path) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen([sys.executable, "-c", HOLD, store_url, str(directory)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "holding"
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def held_elsewhere(store: Store, at: float = NOW) -> Lease:
    while (lease := store.leases.take(store.leases.read(LEASE), ELSEWHERE, who="elsewhere", now=at)) is None:
        pass  # its owner's heart beat between the two
    return lease


def test_a_lease_is_held_renewed_and_given_back_also_after_a_failure(store: Store, tmp_path: Path):
    with pytest.raises(KeyError), exclusive_cycle(store, tmp_path, who="me", beat_s=0.01, clock=lambda: NOW) as holding:
        mine = store.leases.read(LEASE)
        assert mine.owner is not None
        assert (mine.token, mine.owner.pid, mine.renewed_at) == (1, os.getpid(), NOW)
        end = time.monotonic() + 60
        while store.leases.read(LEASE).beat < 3:
            assert time.monotonic() < end
        holding.check()
        raise KeyError
    assert store.leases.read(LEASE).owner is None
    with exclusive_cycle(store, tmp_path, who="me"):
        assert store.leases.read(LEASE).token == 2


def test_the_file_lock_keeps_out_who_shares_the_directory_and_the_lease_who_shares_the_store(
    store: Store, tmp_path: Path
):
    with exclusive_cycle(store, tmp_path / "one", who="me"):
        with pytest.raises(Busy, match="another cycle"), project_lock(tmp_path / "one"):
            pass
        with pytest.raises(Busy, match=f"process {os.getpid()} on"), exclusive_cycle(store, tmp_path / "two", who="me"):
            pass
    with exclusive_cycle(store, tmp_path / "two", who="me"):
        pass


def test_a_process_that_lives_keeps_its_lease_and_one_that_was_killed_loses_it_at_once(store: Store, tmp_path: Path):
    url = f"sqlite:///{tmp_path}/store.db"
    with another_process(url, tmp_path / "theirs") as child:
        # Even if it hangs: on its own machine the kernel says whether it lives, and no clock.
        os.kill(child.pid, signal.SIGSTOP)
        with pytest.raises(Busy, match=f"process {child.pid} on"), exclusive_cycle(store, tmp_path / "mine", who="me"):
            pass
        child.kill()
        while (found := lives(store.leases.read(LEASE).owner or ELSEWHERE)) is not False:
            assert found is True  # until the signal arrives; nobody has to wait for the zombie
        with exclusive_cycle(store, tmp_path / "mine", who="me", watch_s=600):
            assert store.leases.read(LEASE).token == 2
    assert store.verify() == []


@pytest.mark.parametrize("jump_s", [-5 * DAY_S, 0.0, 10 * DAY_S])
def test_no_clock_lets_two_run_nor_blocks_for_ever(store: Store, tmp_path: Path, jump_s: float):
    lease, stop = held_elsewhere(store), Event()

    def renew() -> None:
        while not stop.wait(0.02):
            store.leases.renew(lease, now=NOW)

    beating = Thread(target=renew)
    beating.start()
    try:
        with pytest.raises(Busy, match="on elsewhere"):
            with exclusive_cycle(store, tmp_path, who="me", watch_s=60, clock=lambda: NOW + jump_s):
                pass
    finally:
        stop.set()
        beating.join()
    with exclusive_cycle(store, tmp_path, who="me", watch_s=0.1, clock=lambda: NOW + jump_s):
        assert store.leases.read(LEASE).token == 2
        assert not store.leases.renew(lease, now=NOW)


def test_a_lease_that_is_given_back_while_it_is_watched_is_taken(store: Store, tmp_path: Path):
    lease = held_elsewhere(store)
    Thread(target=lambda: (time.sleep(0.1), store.leases.release(lease))).start()
    with exclusive_cycle(store, tmp_path, who="me", watch_s=60):
        assert store.leases.read(LEASE).token == 2


def test_who_lost_the_lease_is_told_and_changes_nothing(store: Store, tmp_path: Path):
    with exclusive_cycle(store, tmp_path, who="me", beat_s=0.01) as holding:
        holding.store.write([TrajectoryInfo("before", 1.0)])
        held_elsewhere(store)
        with pytest.raises(Busy, match="taken over"):
            holding.store.write([TrajectoryInfo("after", 1.0)])
        end = time.monotonic() + 60
        with pytest.raises(Busy, match="taken over"):
            while time.monotonic() < end:
                holding.check()
    assert store.leases.read(LEASE).owner == ELSEWHERE  # what is not ours is not given back
    assert [t.id for t in store.read.trajectories(["before", "after"])] == ["before"]


def test_a_process_is_its_boot_its_table_its_id_and_its_beginning():
    with owning() as me:
        assert (lives(me), me.pid) == (True, os.getpid())
        assert lives(replace(me, id="another holding of ours")) is False
        assert lives(replace(me, boot="another")) is None
        assert lives(replace(me, started="1")) is False  # its id went to another process
        child = subprocess.Popen([sys.executable, "-c", ""])
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert lives(replace(me, pid=child.pid)) is False
        child.wait()
        assert lives(replace(me, pid=child.pid)) is False
    assert lives(me) is False


def test_where_the_kernel_does_not_say_nothing_is_known(tmp_path: Path):
    with owning(proc=tmp_path) as me:
        assert (me.boot, me.started) == (None, None)
        assert lives(me) is None
