"""The queue between the app's threads and the store, and the thread behind it.

The app's thread only runs `put()`: a size check and one append. It never waits, and may be called from anywhere, even
from the garbage collector. The recorder's thread starts with the first call, or in `patch()` if the store is behind a
network. It parses the items and puts the records into the spool at once, where they survive the process. Every
`flush_interval_s` it writes them to the store in batches; every `poll_interval_s` it calls `on_tick`. Each call is
either recorded, or dropped and counted, or still waiting. A forked child has an empty queue, new locks, its own thread,
spool and connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from art_patch._lib.faults import Unstorable, faults
from art_patch._lib.forking import late_import, steps
from art_patch._lib.os_threads import Empty, Flag, NativeThread, Queue, RLock
from art_patch.recording import losses, process
from art_patch.recording.delivery import Delivery, Sink, Sized
from art_patch.recording.exchange import FIXED_SIZE, Exchange
from art_patch.recording.losses import Accounts
from art_patch.settings import Settings
from art_patch.store import waits_for_network

if TYPE_CHECKING:
    from art_patch.recording.converting import Converter, OnShadow
    from art_patch.recording.telemetry import Telemetry
    from art_patch.types import Record

# Most items that are read before they go to the spool together.
COLLECT_ITEMS = 200

# So long the thread waits for further items before it reads. A call is in the spool a few milliseconds later.
GATHER_S = 0.005

# If more items wait, the thread does not pause for the app any more, and goes back to reading after each batch.
BUSY_ITEMS = 20

# If a pause takes so long, the app's threads leave the interpreter no time. Then each pause costs them more than it
# gives, and few long turns are better than many short ones.
CROWDED_S = 0.002
CROWDED_GATHER_S = 0.05

# The thread pauses for this long after each call that it reads and each batch that it writes; see `_breathe`.
PAUSE_S = 0.0001

EXIT_LOOKS_EVERY_S = 0.01
# Once everything is in the spool, the exit waits so long for a store on this machine: a batch takes less.
EXIT_SPOOLED_S = 0.03


@dataclass(eq=False, slots=True)
class _Flush:
    """A mark in the queue. Its flag is set once everything before it is written."""

    written: Flag = field(default_factory=Flag)
    given_up: bool = False


_Item: TypeAlias = "tuple[Exchange | Record | _Flush, int]"


class Recorder:
    """The queue and the thread that record the calls of a process. Any thread may call the public methods."""

    def __init__(
        self,
        settings: Settings,
        *,
        open_sink: Callable[[], Sink] | None = None,
        spools: Path | None = None,
        on_tick: Callable[[], None] = lambda: None,
        on_shadow: OnShadow | None = None,
    ) -> None:
        """Start with an empty queue and without a thread.

        Args:
            open_sink: opens the destination of records when there is a first batch. Without it, the store is opened,
                and records are spooled beside it.
            spools: directory of the spools for another destination; `None`: records wait for it in memory.
            on_shadow: called by the thread with each call of which policies get a copy in the background.
        """
        self.settings = settings
        self.generation = 0
        self._open_sink = open_sink or self._open_store
        self._spools = settings.spools / settings.project if open_sink is None else spools
        self._on_tick = on_tick
        self._on_shadow = on_shadow
        self._begin()
        process.register(self)

    def _begin(self) -> None:
        # Native locks, see `_lib.os_threads`. Re-entrant, because the garbage collector may call `put()` in the middle
        # of a `put()` of the same thread. There a plain lock, and so `queue.Queue` or `threading.Event`, would wait
        # for itself for ever.
        self._lock = RLock()
        self._queue: Queue[_Item] = Queue()
        self._nudge = Flag()
        self._stopping = False
        self._thread: NativeThread | None = None
        # How many bytes and records it holds, has written and has lost.
        self.accounts = Accounts(self.settings.queue_mib << 20)
        self._said = ""
        self._gave_up = False
        self._leaves = False  # whether the process ends, and what is in the spool may stay there
        self._read = 0
        self._flushes: list[_Flush] = []
        self._converter: Converter | None = None
        self._telemetry: Telemetry | None = None
        self._delivery = Delivery(self._open_sink, self._breathe)
        self._hurried = False
        self._crowded = False

    def _open_store(self) -> Sink:
        with late_import():  # SQLAlchemy: not before the first flush, not in the app's threads
            from art_patch.store import open_store

        return open_store(
            self.settings.store_url, project=self.settings.project, trouble=faults.trouble, spools=self.settings.spools
        )

    # What the app's threads call.

    def put(self, item: Exchange | Record, size: int) -> bool:
        """Queue an item of `size` bytes; return false if the queue is full or belongs to another process."""
        if isinstance(item, Exchange) and item.generation != self.generation:
            return False  # the call began before the fork, so the parent records it
        if not self.accounts.take(type(item).__name__, size):
            return False
        self._queue.put((item, size))
        if self._thread is None:
            self.ensure_running()
        return True

    def put_record(self, record: Record) -> bool:
        """Queue a record that needs no parsing; return false if it is dropped."""
        return self.put(record, FIXED_SIZE + len(repr(record)))

    @property
    def running(self) -> bool:
        """Whether the recorder's thread runs, which calls `on_tick`."""
        return self._thread is not None

    def ensure_running(self) -> None:
        """Start the recorder's thread if it does not run."""
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is not None:
                return
            self._stopping = False
            process.write_before_the_app_ends()
            # Assigned before the start: the thread sets it to `None` when it ends, which may be at once.
            self._thread = thread = NativeThread(self._run, "art_patch-recorder")
            try:
                thread.start()
            except BaseException as error:
                self._thread = None
                if not isinstance(error, RuntimeError):  # too many threads, or the interpreter is going down
                    raise
                faults.trouble("recording.thread", error)

    def flush(self, timeout_s: float) -> bool:
        """Wait until the queued records are written; return false if that takes longer than `timeout_s`."""
        if self.accounts.unwritten == 0:
            return True
        marker = self._ask_to_write()
        done = marker.written.wait(timeout_s)
        marker.given_up = True
        return done

    def _ask_to_write(self) -> _Flush:
        marker = _Flush()
        self._queue.put((marker, 0))
        self.ensure_running()
        self._nudge.set()
        return marker

    def stop(self, timeout_s: float) -> bool:
        """Write the queued records and end the thread, until the next `put()`; return false if that takes too long."""
        deadline = time.monotonic() + timeout_s
        done = self.flush(timeout_s)
        thread = self._thread
        if thread is not None:
            self._stopping = True
            self._queue.put((_Flush(), 0))
            self._nudge.set()
            thread.join(max(0.0, deadline - time.monotonic()))
        return done

    @property
    def steps(self) -> int:
        """A number that grows with each import, call or batch of the thread. `end` waits for as long as it grows."""
        # While the store cannot be written, an import is no progress of the store, but one of the app.
        return self._read + self._delivery.steps + steps(imports=self.trouble is None)

    @property
    def trouble(self) -> str | None:
        """Class name of the store's error while writing fails; `None` while it works."""
        return self._delivery.trouble

    @property
    def waits_where(self) -> str:
        """Where records wait for the store: `on the disk`, or `in memory` if there is no spool or it takes no more."""
        spool = self._delivery.spool
        return "in memory" if spool is None or spool.trouble is not None else "on the disk"

    @property
    def losses(self) -> str:
        """Sentences that say how many records were lost and why; empty if none was."""
        return losses.sentence(dict(self.accounts.lost))

    def say_losses(self) -> None:
        """Write one line to stderr about the records that were lost or still wait, unless it was written before."""
        accounts = self.accounts
        waits = losses.SLOW if self.trouble is None else losses.unwritable(self.trouble)
        line = losses.sentence({**accounts.lost, waits: accounts.waiting})
        if accounts.spooled and waits_for_network(self.settings.store):
            waits = f"{accounts.spooled} wait in {self._spools} until the next process of this project starts here"
            line = f"{line}. {waits}" if line else waits
        if line and line != self._said:
            self._said = line
            losses.say(f"art_patch: {line}")

    def end(self, deadline: float, latest: float) -> float:
        """Write the queued records before the process ends, and report on stderr those that were lost.

        Waiting ends at the monotonic time `deadline`, which each progress (`steps`) moves, but never beyond `latest`.
        For a store on this machine it ends when all is in the spool. Returns the moved deadline, for the next recorder.
        """
        if self.accounts.unwritten and not self._gave_up:
            self._leaves = not waits_for_network(self.settings.store)
            marker, steps, now, safe_until = self._ask_to_write(), self.steps, 0.0, inf
            while not self._gave_up and now < safe_until and not marker.written.wait(EXIT_LOOKS_EVERY_S):
                now = time.monotonic()
                if self.steps > steps:
                    steps, deadline = self.steps, min(now + process.EXIT_DEADLINE_S, latest)
                if self._leaves and not self.accounts.waiting:
                    safe_until = min(safe_until, now + EXIT_SPOOLED_S if self._delivery.sink else now)
                self._gave_up = now >= deadline
            marker.given_up = True
        self.stop(0.0 if self.accounts.unwritten else max(0.0, deadline - time.monotonic()))
        self.say_losses()
        return deadline

    def restart_in_child(self) -> None:
        """Start again with an empty queue in a forked child. The parent keeps its queue and its connections."""
        # Closing an inherited SQLite connection would release the parent's file locks, so the connection must never
        # even be collected. The spool's lock stays with the parent, too, if the child closes its copy of the file.
        _graveyard.append(self._delivery)
        if self._delivery.spool is not None:
            self._delivery.spool.let_go()
        self.generation += 1
        self._begin()

    # What the thread does.

    def _run(self) -> None:
        try:
            self._prepare()
            self._loop()
            self._delivery.close()
            if self._telemetry is not None:
                self._telemetry.close()
        except Exception as error:
            faults.fault("recording.loop", error)
        finally:
            self._thread = None
        if not self._queue.empty() and not self._delivery.pending:
            self.ensure_running()  # an item was queued after the last look at the queue, when `put()` saw a thread

    def _prepare(self) -> None:
        """Import what only this thread needs, so that `patch()` and the app's first call are spared it."""
        if self._converter is not None:
            return
        with late_import():
            converting = import_module("art_patch.recording.converting")
            telemetry = import_module("art_patch.recording.telemetry")
            from art_patch.store import Spool
        settings = self.settings
        if self._spools is not None and settings.spool_mib:
            self._delivery.spool = Spool(self._spools, settings.spool_mib << 20)
        self._telemetry = telemetry.Telemetry() if settings.otel == "auto" else None
        self._converter = converting.Converter(
            sample_rate=settings.sample_rate, redact=settings.redact, on_shadow=self._on_shadow
        )

    def _loop(self) -> None:
        # Only this thread reads a store behind a network, so the first tick comes at once.
        wait_s = 0.0 if waits_for_network(self.settings.store) else self.settings.poll_interval_s
        tick_at = time.monotonic() + wait_s
        while True:
            now = time.monotonic()
            if now >= tick_at:
                self._tick()
                tick_at = now + self.settings.poll_interval_s
            if now >= self._delivery.due_at:
                self._deliver()
            until = min(tick_at, self._delivery.due_at)
            if self._delivery.takes_more:
                self._collect(max(0.0, until - now))
            # The store is down, and the spool is full or missing. What is queued stays there as bytes, which are
            # smaller than records.
            elif self._nudge.wait(max(0.0, until - now)):
                self._deliver()
            if self._stopping and (self._delivery.pending or self._queue.empty()):
                return

    def _collect(self, timeout_s: float) -> None:
        """Read what is queued, and put it into the spool."""
        try:
            item = self._queue.get(timeout_s)
        except Empty:
            return
        self._hurried = self._nudge.wait(CROWDED_GATHER_S if self._crowded else GATHER_S)
        self._crowded = False
        sized: list[Sized] = []
        for _ in range(COLLECT_ITEMS):
            self._sort(item, sized)
            self._breathe()
            try:
                item = self._queue.get()
            except Empty:
                break
        else:
            self._sort(item, sized)
        self.accounts.keep(self._delivery.add(sized, time.monotonic() + self.settings.flush_interval_s))
        if self._hurried:
            self._deliver()

    @property
    def _busy(self) -> bool:
        return len(self._queue) > BUSY_ITEMS

    def _breathe(self) -> None:
        """Let the app's threads run, unless a caller waits for a flush or many items wait."""
        if self._hurried or self._crowded or self._busy:
            return
        # While this thread computes, the interpreter switches to another thread only every 5 ms, so a call that ends
        # meanwhile would wait for that long. A short pause is enough: a thread that waits takes the interpreter, and
        # keeps it until it waits itself.
        began = time.monotonic()
        self._hurried = self._nudge.wait(PAUSE_S)
        self._crowded = time.monotonic() - began > CROWDED_S

    def _sort(self, item: _Item, sized: list[Sized]) -> None:
        content, size = item
        if isinstance(content, _Flush):
            self._flushes.append(content)
            return
        try:
            records = cast("Converter", self._converter).convert(content)
        except Exception as error:
            unstorable = isinstance(error, Unstorable)
            self.accounts.forget(type(content).__name__, size, losses.REDACTION if unstorable else losses.FAULT)
            if not unstorable:
                faults.fault("recording.convert", error)
            return
        finally:
            self._read += 1
        if not records:
            self.accounts.forget(type(content).__name__, size)
            return
        if self._telemetry is not None:
            self._telemetry.saw(content, records)
        # Only the last record carries the size, so the bytes are freed once, when all records of the item are written.
        sized += [(record, 0) for record in records[:-1]]
        sized.append((records[-1], size))

    def _deliver(self) -> None:
        if self._leaves and self._delivery.sink is None and not self.accounts.waiting:
            return  # whoever opens the store next writes it
        written, poison = self._delivery.attempt(
            time.monotonic(), lambda: (self._busy or self._crowded) and not self._hurried
        )
        self.accounts.wrote(written)
        self.accounts.release(poison, losses.REFUSED)
        if not self._delivery.pending:
            for marker in self._flushes:
                marker.written.set()
            self._flushes.clear()
        else:
            self._flushes = [marker for marker in self._flushes if not marker.given_up]

    def _tick(self) -> None:
        try:
            self._on_tick()
        except Exception as error:
            faults.fault("recording.tick", error)


_graveyard: list[Delivery] = []
