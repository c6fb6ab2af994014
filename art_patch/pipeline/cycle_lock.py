"""One cycle at a time: a file lock on the project for this machine, and a lease on the store for all of them.

The kernel frees the lock of a process that died. The lease of one is taken over at once where its machine can tell
that it is dead, else after half a minute in which it was not renewed; nobody compares clocks. Whoever loses the lease
learns it at the next step, and its writes are refused in any case (`store.leases`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

from filelock import FileLock, Timeout

from art_patch._lib.process import Owner, lives, owning
from art_patch.errors import Busy, StoreError
from art_patch.store import Lease, Leases, Store, lost

LEASE = "cycle"
BEAT_S = 5.0
"""How often the owner renews it."""
WATCH_S = 30.0
"""How long an owner on another machine may be silent before it counts as gone."""


class Holding:
    """What a cycle has while nobody else runs one.

    Attributes:
        store: the store; it refuses every write once the lease is lost.
    """

    def __init__(self, store: Store, lease: Lease) -> None:
        """Hold `lease` on `store`."""
        self.store = store.fenced(lease)
        self._lease = lease
        self._lost = Event()

    def check(self) -> None:
        """Pass while the lease is ours, as far as the last renewal knew.

        Raises:
            Busy: it was taken over.
        """
        if self._lost.is_set():
            raise lost(self._lease)

    def keep(self, leases: Leases, stop: Event, *, beat_s: float, clock: Callable[[], float]) -> None:
        """Renew the lease until told to stop. A store that is away is tried again: only a renewal can say it is lost.

        Args:
            leases: of the store.
            stop: set when the cycle has ended.
            beat_s: how often.
            clock: seconds since the epoch.
        """
        while not stop.wait(beat_s):
            with suppress(StoreError):
                if not leases.renew(self._lease, now=clock()):
                    self._lost.set()
                    return


@contextmanager
def only_one(directory: Path) -> Generator[None]:
    """Hold the project's lock on this machine; the kernel frees it if we are killed.

    Raises:
        Busy: if another process holds it.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = FileLock(directory / "cycle.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise Busy(
            f"another cycle is running on {directory}; this one did nothing. Try again when it is done"
        ) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def alone(
    store: Store,
    directory: Path,
    *,
    who: str,
    beat_s: float = BEAT_S,
    watch_s: float = WATCH_S,
    clock: Callable[[], float] = time.time,
) -> Generator[Holding]:
    """Be the only one, on all machines, who runs a cycle on this store and in this directory.

    Args:
        store: whose policies the cycle moves.
        directory: the project's.
        who: for the audit log, if the lease is taken over from a process that is gone.
        beat_s: how often the lease is renewed.
        watch_s: how long an owner that cannot be asked may be silent.
        clock: seconds since the epoch; shown to people, and decides nothing.

    Raises:
        Busy: another cycle runs.
    """
    with only_one(directory), owning() as me:
        lease = _take(store.leases, me, who=who, watch_s=watch_s, clock=clock)
        holding, stop = Holding(store, lease), Event()
        arguments = {"beat_s": beat_s, "clock": clock}
        thread = Thread(target=holding.keep, args=(store.leases, stop), kwargs=arguments, name="art-patch-lease")
        thread.daemon = True
        thread.start()
        try:
            yield holding
        finally:
            stop.set()
            thread.join()
            with suppress(StoreError):  # then the next cycle finds that we are gone
                store.leases.release(lease)


def _take(leases: Leases, me: Owner, *, who: str, watch_s: float, clock: Callable[[], float]) -> Lease:
    seen = leases.read(LEASE)
    if seen.owner is not None:
        alive = lives(seen.owner)
        if alive is None:
            seen = _watch(leases, seen, watch_s)
        if alive or seen is None:
            raise _busy(leases.read(LEASE).owner)
    lease = leases.take(seen, me, who=who, now=clock())
    if lease is None:
        raise _busy(leases.read(LEASE).owner)
    return lease


def _watch(leases: Leases, seen: Lease, watch_s: float) -> Lease | None:
    """Return the lease if it may be taken: it was given back, or not renewed in all this time. No clock can be set."""
    end = time.monotonic() + watch_s
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 1.0))
        now = leases.read(LEASE)
        if now.owner is None:
            return now
        if (now.token, now.beat) != (seen.token, seen.beat):
            return None
    return seen


def _busy(owner: Owner | None) -> Busy:
    whose = f" ({owner})" if owner else ""
    return Busy(f"another cycle is running on this store{whose}; this one did nothing. Try again when it is done")
