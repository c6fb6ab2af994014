"""The cycle that runs: only one does at a time, and `running.json` in the project's directory tells how far it is.

A file lock excludes others on one machine, and a lease in the store on all machines. The kernel frees the file lock
when the process that holds it dies. The lease is a row in the store that names its owner, and the owner renews it every
`BEAT_S` seconds. If another process takes the lease over, the old owner learns this at its next step, and the store
refuses its writes.

`running.json` is for people who look at the cycle. It is gone when the cycle has ended. That of a cycle that was killed
stays: whoever reads it asks whether its process lives. Writing it never fails a cycle.
"""

import json
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from threading import Event, Thread
from typing import Any

from filelock import FileLock, Timeout

from art_patch._lib.atomic_files import replacing
from art_patch._lib.process import Owner, lives, owning
from art_patch.errors import Busy, StoreError
from art_patch.pipeline.cycle_run import Progress
from art_patch.store import Lease, Leases, Store, lost
from art_patch.types import JSON

LEASE = "cycle"
BEAT_S = 5.0  # seconds between two renewals of the lease
WATCH_S = 30.0  # an owner on another machine that does not renew its lease for this many seconds counts as dead
RUNNING = "running.json"
"""Name of the file in the project's directory."""
_NOTED_EVERY_S = 0.5  # at most so often within a stage


class CycleLease:
    """The exclusive right of this process to run a cycle on a store."""

    def __init__(self, store: Store, lease: Lease) -> None:
        self.store = store.fenced(lease)  # every write fails once the lease is lost
        self._lease = lease
        self._lost = Event()

    def check(self) -> None:
        """Raise `Busy` if the last renewal found that another process took the lease over; no query is sent."""
        if self._lost.is_set():
            raise lost(self._lease)

    def guarding(self, progress: Progress) -> Progress:
        """Return a progress callback that first checks the lease and then calls `progress`."""

        def report(stage: str, done: int, total: int, note: str = "") -> None:
            self.check()
            progress(stage, done, total, note)

        return report

    def renew_until(self, stop: Event, leases: Leases, *, beat_s: float, clock: Callable[[], float]) -> None:
        """Renew the lease every `beat_s` seconds until `stop` is set or the lease is lost."""
        while not stop.wait(beat_s):
            # A store that cannot be reached says nothing about the lease. Only an answered renewal can say it is lost.
            with suppress(StoreError):
                if not leases.renew(self._lease, now=clock()):
                    self._lost.set()
                    return


@contextmanager
def project_lock(directory: Path, what: str = "cycle") -> Generator[None]:
    """Hold a lock file of a project's directory while the block runs; raises `Busy` if another process holds it."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = FileLock(directory / f"{what}.lock", timeout=0, mode=0o600)
    try:
        lock.acquire()
    except Timeout:
        raise _busy(str(directory), what) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def exclusive_cycle(
    store: Store, directory: Path, *, who: str, beat_s: float = BEAT_S, watch_s: float = WATCH_S,
    clock: Callable[[], float] = time.time,
) -> Generator[CycleLease]:  # fmt: skip
    """Hold the project's lock file and the store's lease while the block runs; `Busy` if another process holds one.

    `who` goes into the audit log if the lease is taken over from a dead process; `clock` gives times for people only.
    """
    # The file lock first: it costs nothing, and excludes a second process of this project without a write to the store.
    with project_lock(directory), owning() as me:
        lease = _take(store.leases, me, who=who, watch_s=watch_s, clock=clock)
        held, stop = CycleLease(store, lease), Event()
        renewal = {"beat_s": beat_s, "clock": clock}
        # A daemon: a cycle that hangs at exit must not be kept alive by its own renewals.
        renew, leases = held.renew_until, (stop, store.leases)
        thread = Thread(target=renew, name="art-patch-lease", args=leases, kwargs=renewal, daemon=True)
        thread.start()
        try:
            yield held
        finally:
            stop.set()
            thread.join()
            # An unreachable store keeps the lease. The next cycle sees that this process has ended and takes it over.
            with suppress(StoreError):
                store.leases.release(lease)


def _take(leases: Leases, me: Owner, *, who: str, watch_s: float, clock: Callable[[], float]) -> Lease:
    seen = leases.read(LEASE)
    if seen.owner is not None:
        # `None`: the owner is on another machine or in another process namespace, so its process cannot be looked up.
        alive = lives(seen.owner)
        if alive is None:
            seen = _watch(leases, seen, watch_s)
        if alive or seen is None:
            raise _busy_store(leases)
    # `take` compares the lease with `seen` inside one transaction, so of two processes that arrive here one wins.
    lease = leases.take(seen, me, who=who, now=clock())
    if lease is None:
        raise _busy_store(leases)
    return lease


def _watch(leases: Leases, seen: Lease, watch_s: float) -> Lease | None:
    """Return the lease if its owner released it or renewed nothing for `watch_s` seconds; `None` if the owner lives."""
    # Monotonic time and a counter of renewals: wall clocks of two machines may differ by days.
    end = time.monotonic() + watch_s
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 1.0))
        now = leases.read(LEASE)
        if now.owner is None:
            return now
        if (now.token, now.beat) != (seen.token, seen.beat):
            return None
    return seen


def _busy_store(leases: Leases) -> Busy:
    owner = leases.read(LEASE).owner
    return _busy(f"this store ({owner})" if owner else "this store")


def _busy(where: str, what: str = "cycle") -> Busy:
    return Busy(f"another {what} is running on {where}; this one did nothing. Try again when it is done")


@contextmanager
def noting(directory: Path, progress: Progress, *, who: str, began_at: float) -> Generator[Progress]:
    """Yield a progress callback that also notes each stage, and how much of it is done, while the block runs."""
    path, stages, last = directory / RUNNING, dict[str, JSON](), [0.0]
    with owning() as owner:
        facts = {"owner": asdict(owner), "who": who, "began_at": began_at, "stages": stages}

        def write() -> None:
            last[0] = time.monotonic()
            with suppress(OSError), replacing(path) as file:
                file.write(json.dumps(facts).encode())

        def report(stage: str, done: int, total: int, note: str = "") -> None:
            is_new, now = stage not in stages, time.time()
            stages[stage] = {"since": now, **stages.get(stage, {}), "done": done, "total": total, "at": now}
            if is_new or done >= total or time.monotonic() - last[0] >= _NOTED_EVERY_S:
                write()
            progress(stage, done, total, note)

        write()
        try:
            yield report
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def read_running(directory: Path) -> JSON | None:
    """Return who runs a cycle since when, and its stages so far; `None` if none runs, as far as one can tell here."""
    try:
        facts: Any = json.loads((directory / RUNNING).read_text("utf-8"))
        owner = Owner(**facts.pop("owner"))
        return None if lives(owner) is False else dict(facts)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
