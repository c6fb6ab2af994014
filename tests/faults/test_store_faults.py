"""f8 to f14, s08: the disk is full, read-only or broken, the database locked, gone or corrupt. The app never notices.

What was acknowledged before the fault stays where it was written; what was not is written when the store is back, or
dropped and counted: `recorded + dropped == calls` at all times.
"""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import art_patch as art
from art_patch.errors import StoreError
from art_patch.patching import control
from art_patch.store import open_store
from art_patch.types import TrajectoryInfo
from tests.support.apps import App, Programs, Store, eventually


@contextmanager
def mounted(directory: Path, *options: str) -> Iterator[None]:
    directory.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", *options, str(directory)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def dropped() -> int:
    runtime = control._process.runtime
    assert runtime is not None
    return sum(tally.calls for tally in runtime.recorder.account._lost.values())


def test_f08_disk_full(app: App, store: Store, figure):
    with mounted(store.path.parent, "-t", "tmpfs", "-o", "size=2m", "tmpfs"):
        app.patch(queue_mib=1)
        app.call("first")
        assert art.flush(10)
        filler = store.path.parent / "filler"
        descriptor = os.open(filler, os.O_WRONLY | os.O_CREAT)
        with pytest.raises(OSError, match="o space left"):
            while True:
                os.write(descriptor, bytes(4096))
        os.close(descriptor)
        calls = 1
        for number in range(120):
            assert app.call(f"{number} {os.urandom(10_000).hex()}").choices
            calls += 1
        assert not art.flush(1.0)
        status = art.status()
        assert any("store cannot be written" in line for line in status.degraded)
        assert dropped() > 0
        filler.unlink()
        # There is not room for all of it. What fits comes in; the size of a call decides nothing about correctness.
        subprocess.run(["mount", "-o", "remount,size=64m", str(store.path.parent)], check=True)
        assert art.flush(60)
        app.call("last")
        assert art.flush(60)
        calls += 1
        status = art.status()
        assert status.recorded == store.count()
        assert status.recorded + dropped() == calls
        assert not any("cannot be written" in line for line in status.degraded)
        texts = store.texts()
        assert {"first", "last"} <= set(texts)
        assert store.problems() == []
        figure("f08 disk full: recorded + dropped / calls", f"{status.recorded} + {dropped()} / {calls}", "exact")
        art.unpatch()


def lock(store: Store) -> sqlite3.Connection:
    connection = sqlite3.connect(store.path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    return connection


@pytest.mark.slow
@pytest.mark.parametrize("spool_mib", [0, 1024])
def test_f09_s08_f14_database_locked_for_long(app: App, store: Store, figure, spool_mib):
    """The spool keeps everything. Without it the queue fills up, the rest is dropped and counted; no caller waits."""
    app.patch(queue_mib=8, spool_mib=spool_mib)
    app.call("first")
    assert art.flush(10)
    body = "x" * 20_000  # 40 KB a call with its headers and its wait: 8 MiB are full after some 350
    took: dict[str, list[float]] = {"before": [], "locked": []}

    def calls(phase: str, count: int) -> None:
        for number in range(count):
            begun = time.perf_counter()
            app.call(f"{phase} {number} {body}")
            took[phase].append(time.perf_counter() - begun)

    def four(phase: str, count: int) -> None:
        threads = [threading.Thread(target=calls, args=(phase, count)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    four("before", 25)
    assert art.flush(30)
    holder = lock(store)
    grown_from = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    four("locked", 250)
    made = 101 + 1000
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown_from) / 1024
    lost = dropped()
    assert (lost > 0) == (spool_mib == 0)
    # At first the store only seems slow, so it is the queue; then SQLite says that it is locked.
    causes = ("because the queue was full", "because the store could not be written")
    assert any(cause in line for cause in causes for line in art.status().degraded) == (spool_mib == 0)
    holder.execute("ROLLBACK")
    holder.close()
    assert art.flush(60)
    status = art.status()
    assert status.recorded + dropped() == made
    assert status.recorded == store.count()
    assert dropped() == lost
    app.call("after")
    assert art.flush(30)
    assert art.status().recorded == status.recorded + 1

    def p50(phase: str) -> float:
        return sorted(took[phase])[len(took[phase]) // 2] * 1000

    figure(
        f"s08, spool of {spool_mib} MiB: locked store: recorded + dropped / calls",
        f"{status.recorded} + {lost} / {made}",
        "exact",
    )
    figure(
        f"s08, spool of {spool_mib} MiB: resident memory grown, MiB (queue of 8, stub included)",
        round(grown, 1),
        "<= queue + 10 % + stub",
    )
    figure(
        f"s08, spool of {spool_mib} MiB: caller p50 before / while locked, ms (four threads)",
        f"{p50('before'):.2f} / {p50('locked'):.2f}",
        "",
    )


DAMAGES: dict[str, Any] = {}


def damage(function: Any) -> Any:
    DAMAGES[function.__name__] = function
    return function


@damage
def deleted(store: Store) -> None:
    store.path.unlink()


@damage
def all_deleted(store: Store) -> None:
    for path in store.path.parent.glob("store.db*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@damage
def directory_deleted(store: Store) -> None:
    shutil.rmtree(store.path.parent)


@damage
def replaced(store: Store) -> None:
    other = store.path.with_name("other.db")
    open_store(f"sqlite:///{other}").close()
    os.replace(other, store.path)


@damage
def moved_away(store: Store) -> None:
    store.path.parent.rename(store.path.parent.with_name("elsewhere"))


@pytest.mark.parametrize("how", DAMAGES)
def test_f10_file_gone_under_an_open_connection(app: App, store: Store, figure, how):
    app.patch()
    with art.trajectory("one task", scenario="sums") as run:
        app.call("before")
        assert art.flush(10)
        DAMAGES[how](store)
        for number in range(20):
            app.call(f"after {number}")
        assert art.flush(30)
    app.call("another task")
    assert art.flush(30)
    assert set(store.texts()) == {f"after {number}" for number in range(20)} | {"another task"}
    assert store.problems() == []
    with store.opened() as opened:
        (found,) = opened.read.trajectories([run.id])
    assert (found.info.scenario_key, found.info.name) == ("sums", "one task")
    assert art.status().errors == {"store.gone": 1}
    assert art.status().degraded == ()
    assert not list(store.path.parent.glob("*.corrupt-*"))
    figure(f"f10 {how.replace('_', ' ')}: unacknowledged calls lost", 0, "0")


def test_f10_two_processes_and_one_deleted_file(app: App, programs: Programs, store: Store, figure):
    """Whoever notices later, or never, does not take the new file's log away when its old connections are closed."""
    code = """
for line in sys.stdin:
    if line.strip():
        call(line.strip())
        assert art.flush(30)
    print("ok", flush=True)
"""
    app.patch()

    def tell(process: Any, text: str) -> None:
        process.stdin.write(f"{text}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ok\n"

    with programs.start(code, stdin=subprocess.PIPE) as busy, programs.start(code, stdin=subprocess.PIPE) as idle:
        app.call("before a")
        assert art.flush(10)
        tell(busy, "before b")
        tell(idle, "before c")
        store.path.unlink()
        app.call("after a 1")
        assert art.flush(10)
        tell(busy, "after b 1")
        said, warned = idle.communicate(timeout=30)
        assert said == ""
        # If it looked at the store meanwhile, it says that it is another one; if it did not, nothing.
        assert warned in ("", "art_patch: StoreError in store.gone: the app is not affected (1 so far)\n")
        app.call("after a 2")
        assert art.flush(10)
        tell(busy, "after b 2")
        said = busy.communicate(timeout=30)[1].splitlines()
    assert said == ["art_patch: StoreError in store.gone: the app is not affected (1 so far)"]
    assert store.texts() == ["after a 1", "after a 2", "after b 1", "after b 2"]
    assert store.problems() == []
    figure("f10 deleted under 3 processes: acknowledged in the new file, lost", 0, "0")


BREAKAGES: dict[str, Any] = {}


def breakage(function: Any) -> Any:
    BREAKAGES[function.__name__] = function
    return function


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


@breakage
def zeroed_header(store: Store) -> None:
    overwrite(store.path, 0, bytes(100))


@breakage
def garbage_in_every_page(store: Store) -> None:
    size = store.path.stat().st_size
    for page in range(size // 4096):
        overwrite(store.path, page * 4096 + (100 if page == 0 else 0), os.urandom(2000))


@breakage
def not_a_database(store: Store) -> None:
    overwrite(store.path, 0, b"no database at all " * 400)


@breakage
def cut_short(store: Store) -> None:
    os.truncate(store.path, 5000)


@contextmanager
def all_in_the_file(store: Store) -> Iterator[None]:
    """Nothing in the `-wal`, which would heal the broken file, and nobody who writes to it meanwhile."""
    with closing(sqlite3.connect(store.path, isolation_level=None)) as connection:
        wal = store.path.with_name(f"{store.path.name}-wal")
        for _ in range(100):
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.execute("BEGIN IMMEDIATE")
            if not wal.stat().st_size:
                break
            connection.execute("ROLLBACK")
            time.sleep(0.1)
        else:
            raise AssertionError(f"{wal} is never empty")
        yield


@pytest.mark.parametrize("how", BREAKAGES)
@pytest.mark.parametrize("when", ["running", "before the start"])
def test_f11_corrupt_file_is_set_aside(app: App, store: Store, caplog, figure, how, when):
    app.patch()
    for number in range(30):
        app.call(f"before {number} {os.urandom(500).hex()}")
    assert art.flush(10)
    if when == "before the start":
        art.unpatch()
        control._process.runtime = None
    with all_in_the_file(store):
        BREAKAGES[how](store)
    caplog.clear()
    if when == "before the start":
        app.patch()
    for number in range(20):
        app.call(f"after {number}")
    assert art.flush(30)
    assert store.texts() == sorted(f"after {number}" for number in range(20))
    assert store.problems() == []
    kept = [path for path in store.path.parent.glob("store.db.corrupt-*") if not path.name.endswith(("-wal", "-shm"))]
    assert len(kept) == 1
    assert art.status().errors["store.corrupt"] == 1
    warnings = [record for record in caplog.records if record.levelname in ("WARNING", "ERROR", "CRITICAL")]
    assert len(warnings) == 1
    eventually(lambda: art.status().degraded == ())
    figure(f"f11 {how.replace('_', ' ')}, {when}: app errors", 0, "0")


def test_f11_what_was_never_a_store_of_ours_is_left_alone(app: App, store: Store):
    """The user mistyped the address: the file is not ours to move."""
    store.path.parent.mkdir()
    notes = store.path.with_name("notes.txt")
    notes.write_text("these are my notes, and no database at all\n" * 50)
    before = notes.read_text()
    app.patch(store=f"sqlite:///{notes}")
    assert app.call().choices
    assert not art.flush(0.5)
    assert notes.read_text() == before
    assert any("store cannot be written" in line for line in art.status().degraded)
    store.path.write_text(before)  # the default name, but our lock was never beside it
    with pytest.raises(StoreError, match="not a database"):
        open_store(store.url, trouble=lambda place, error: None)
    assert store.path.read_text() == before


def test_f11_commands_and_newer_stores_leave_the_file_where_it_is(store: Store):
    open_store(store.url).close()
    overwrite(store.path, 0, bytes(100))
    with pytest.raises(StoreError, match="not a database"):
        open_store(store.url)
    assert not list(store.path.parent.glob("*.corrupt-*"))


def test_f12_read_only_filesystem(app: App, store: Store, figure):
    with mounted(store.path.parent, "-t", "tmpfs", "-o", "size=16m", "tmpfs"):
        app.patch(queue_mib=1)
        app.call("before")
        assert art.flush(10)
        subprocess.run(["mount", "--bind", str(store.path.parent), str(store.path.parent)], check=True)
        try:
            done = subprocess.run(["mount", "-o", "remount,bind,ro", str(store.path.parent)], capture_output=True)
            assert done.returncode == 0, done.stderr
            # Files that are open stay writable; a process that starts now finds everything read-only.
            art.unpatch()
            control._process.runtime = None
            app.patch(queue_mib=1)
            for number in range(100):
                assert app.call(f"{number} {'x' * 20_000}").choices
            assert not art.flush(1.0)
            assert any("store cannot be written" in line for line in art.status().degraded)
            runtime = control._process.runtime
            assert runtime is not None and runtime.recorder.account.bytes <= 1 << 20
            assert "route" not in runtime.degraded
        finally:
            subprocess.run(["umount", "-l", str(store.path.parent)], check=True)
        lost = dropped()
        assert art.flush(30)
        status = art.status()
        assert status.recorded + lost == 100
        assert store.count() == 1 + status.recorded
        assert store.problems() == []
        eventually(lambda: not any("cannot be written" in line for line in art.status().degraded))
        figure("f12 read-only: recorded + dropped / calls", f"{status.recorded} + {lost} / 100", "exact")
        art.unpatch()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["12+5", "12+"], ids=["now_and_then", "from_then_on"])
def test_f13_fsync_fails(programs: Programs, store: Store, tmp_path: Path, figure, when):
    """Every batch here is a trajectory's end or a score, so it is committed with an fsync.

    The first are left alone: making the file takes several, and as many again for each try, so that a fixed beat of
    failures would hit every one of them.
    """
    trace = tmp_path / "trace"
    strace = ["strace", "-f", "-qq", "-o", str(trace), "-e", "trace=fsync,fdatasync"]
    try:
        probe = subprocess.run([*strace, "true"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("strace is not installed")
    if probe.returncode:
        pytest.skip(f"ptrace is not permitted here: {probe.stderr.strip()}")
    code = """
for number in range(12):
    with art.trajectory() as run:
        call(str(number))
        art.reward(1.0)
    art.flush(0.3 if number else 60)  # the first also makes the file
art.flush(5)
status = art.status()
print(status.recorded)
"""
    inject = f"inject=fsync,fdatasync:error=EIO:when={when}"
    ran = programs.run(code, before=[*strace, "-e", inject], timeout=240)
    assert (ran.code, "Traceback" in ran.err) == (0, False), ran.err
    recorded = int(ran.out)
    injected = trace.read_text().count("INJECTED")
    assert injected > 0
    assert store.problems() == []
    assert 0 < recorded <= store.count()  # a commit whose fsync failed may be in the file all the same
    assert recorded == 12 or when == "12+"
    figure(
        f"f13 EIO on {injected} fsyncs ({when}): calls acknowledged, in the file", f"{recorded}, {store.count()}", ""
    )


def test_f14_one_call_larger_than_the_queue(app: App, store: Store, figure):
    app.patch(queue_mib=1)
    assert app.call("x" * (2 << 20)).choices
    app.call("small")
    assert art.flush(30)
    assert (store.texts(), dropped()) == (["small"], 1)
    figure("f14 a call larger than the queue: dropped, counted", dropped(), "1")


def test_trajectories_announced_in_a_file_that_is_gone_are_known_in_the_next(store: Store):
    """As the recorder does it: announced once, its calls in later batches."""
    from tests.support.factory import make_call

    opened = open_store(store.url)
    opened.write([TrajectoryInfo("t", 1.0, name="kept"), make_call("a", trajectory_id="t")])
    store.path.unlink()
    opened.write([make_call("b", trajectory_id="t"), make_call("c", trajectory_id="never announced")])
    found = {one.id: one for one in opened.read.recent()}
    assert found["t"].info.name == "kept"
    assert [call.id for call in found["t"].calls] == ["b"]
    assert opened.verify() == []
    opened.close()
