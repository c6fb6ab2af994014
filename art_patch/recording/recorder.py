"""The queue between the app's threads and the store, and the thread behind it.

The app's thread only runs `put()`: a size check and one append. It never waits, and may be called from anywhere, even
from the garbage collector. The recorder's thread starts with the first call, or in `patch()` if the store is behind a
network. It collects items for `flush_interval_s`, parses them, and writes them in batches; every `poll_interval_s` it
also calls `on_tick`. Each call is either recorded, or dropped and counted, or still waiting. A forked child has an
empty queue, new locks, its own thread and connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias, cast

from art_patch._lib.faults import Unstorable, faults
from art_patch._lib.forking import late_import, steps
from art_patch._lib.os_threads import Empty, Flag, NativeThread, Queue, RLock
from art_patch.recording import delivery, process
from art_patch.recording.delivery import Delivery, Sink, Sized, Tally
from art_patch.recording.exchange import FIXED_SIZE, Exchange
from art_patch.settings import Settings
from art_patch.store import waits_for_network
from art_patch.types import UPSTREAM

if TYPE_CHECKING:
    from art_patch.recording.converting import Converter, OnShadow
    from art_patch.recording.telemetry import Telemetry
    from art_patch.types import Record

COLLECT_ITEMS = 200

# The thread pauses for this long after each call that it reads and each batch that it writes; see `_breathe`.
PAUSE_S = 0.0001

EXIT_LOOKS_EVERY_S = 0.05


@dataclass(eq=False, slots=True)
class _Flush:
    """A mark in the queue. Its flag is set once everything before it is written."""

    written: Flag = field(default_factory=Flag)
    given_up: bool = False


@dataclass(slots=True)
class Counts:
    """How many of the app's calls were written to the store."""

    recorded: int = 0
    served_by_policy: int = 0
    fallbacks: int = 0
    engine_full: int = 0


_Item: TypeAlias = "tuple[Exchange | Record | _Flush, int]"


class Recorder:
    """The queue and the thread that record the calls of a process. Any thread may call the public methods."""

    def __init__(
        self,
        settings: Settings,
        *,
        open_sink: Callable[[], Sink] | None = None,
        on_tick: Callable[[], None] = lambda: None,
        on_shadow: OnShadow | None = None,
    ) -> None:
        """Start with an empty queue and without a thread.

        Args:
            open_sink: opens the destination of records when there is a first batch. Without it, the store is opened.
            on_tick: called by the thread every `poll_interval_s`.
            on_shadow: called by the thread with each call of which policies get a copy in the background.
        """
        self.settings = settings
        self._most_bytes = settings.queue_mib << 20
        self.generation = 0
        self._open_sink = open_sink or self._open_store
        self._on_tick = on_tick
        self._on_shadow = on_shadow
        self._begin()
        process.register(self)

    def _begin(self) -> None:
        # All of these are native locks, see `_lib.os_threads`. Re-entrant, because the garbage collector may finalise a
        # stream, and so call `put()`, in the middle of a `put()` of the same thread. There a plain lock, and so
        # `queue.Queue` or `threading.Event`, would wait for itself for ever.
        self._lock = RLock()
        self._queue: Queue[_Item] = Queue()
        self._nudge = Flag()
        self._stopping = False
        self._thread: NativeThread | None = None
        self._bytes = 0
        self.dropped = 0  # calls and other records that were lost: the queue was full, or the store refused them
        self._waiting = Tally()
        self._lost: dict[str, Tally] = {}
        self._said = ""
        self._gave_up = False
        self._read = 0
        self._flushes: list[_Flush] = []
        self._converter: Converter | None = None
        self._telemetry: Telemetry | None = None
        self._delivery = Delivery(self._open_sink, self._breathe)
        self._hurried = False
        self.counts = Counts()

    def _open_store(self) -> Sink:
        with late_import():  # SQLAlchemy: not before the first flush, not in the app's threads
            from art_patch.store import open_store

        return open_store(self.settings.store_url, project=self.settings.project, trouble=faults.trouble)

    # What the app's threads call.

    def put(self, item: Exchange | Record, size: int) -> bool:
        """Queue an item of `size` bytes; return false if the queue is full or belongs to another process."""
        if isinstance(item, Exchange) and item.generation != self.generation:
            return False  # the call began before the fork, so the parent records it
        with self._lock:
            # The newest call is dropped, not the oldest: that costs the caller nothing, while making room would free
            # other calls' bytes in its time. Trajectories that began before the trouble stay whole.
            if self._bytes + size > self._most_bytes:
                self._drop(item, delivery.full_because(self.trouble))
                return False
            self._bytes += size
            self._waiting.add(item)
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
        if self._bytes == 0:
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
    def losses(self) -> str:
        """How many records were lost and why, in sentences; empty if none was."""
        return delivery.sentence(dict(self._lost))

    def say_losses(self) -> None:
        """Write one line to stderr about the records that were lost or still wait, unless it was written before."""
        waits = delivery.SLOW if self.trouble is None else delivery.unwritable(self.trouble)
        line = delivery.sentence({**self._lost, waits: self._waiting})
        if line and line != self._said:
            self._said = line
            delivery.say(f"art_patch: {line}")

    def end(self, deadline: float, latest: float) -> float:
        """Write the queued records before the process ends, and report on stderr those that were lost.

        Waiting ends at the monotonic time `deadline`, which each progress (`steps`) moves, but never beyond `latest`.
        Returns the moved deadline, for the next recorder of the process.
        """
        if self._bytes and not self._gave_up:
            marker, steps = self._ask_to_write(), self.steps
            while not self._gave_up and not marker.written.wait(EXIT_LOOKS_EVERY_S):
                if self.steps > steps:
                    steps, deadline = self.steps, min(time.monotonic() + process.EXIT_DEADLINE_S, latest)
                self._gave_up = time.monotonic() >= deadline
            marker.given_up = True
        self.stop(0.0 if self._gave_up else max(0.0, deadline - time.monotonic()))
        self.say_losses()
        return deadline

    def restart_in_child(self) -> None:
        """Start again with an empty queue in a forked child. The parent keeps its queue and its connections."""
        # Closing an inherited SQLite connection would release the parent's file locks, so the connection must never
        # even be collected.
        _graveyard.append(self._delivery)
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
        settings = self.settings
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
            if self._delivery.pending:
                # The store is down. What is queued stays there as bytes, which are smaller than records, until it is
                # back.
                nudged = self._nudge.wait(max(0.0, min(self._delivery.retry_at, tick_at) - now))
                self._nudge.clear()
                if nudged or time.monotonic() >= self._delivery.retry_at:
                    self._deliver()
            else:
                self._collect(max(0.0, tick_at - now))
            if self._stopping and (self._delivery.pending or self._queue.empty()):
                return

    def _collect(self, timeout_s: float) -> None:
        try:
            item = self._queue.get(timeout_s)
        except Empty:
            return
        self._hurried = self._nudge.wait(self.settings.flush_interval_s)
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
        self._delivery.add(sized)
        self._deliver()

    def _breathe(self) -> None:
        """Let the app's threads run, unless a caller waits for a flush or the queue is over a quarter full."""
        if self._hurried or self._bytes > self.settings.queue_mib << 18:
            return
        # While this thread computes, the interpreter switches to another thread only every 5 ms, so a call that ends
        # meanwhile would wait for that long. A short pause is enough: a thread that waits takes the interpreter, and
        # keeps it until it waits itself.
        self._hurried = self._nudge.wait(PAUSE_S)

    def _sort(self, item: _Item, sized: list[Sized]) -> None:
        content, size = item
        if isinstance(content, _Flush):
            self._flushes.append(content)
            return
        try:
            records = cast("Converter", self._converter).convert(content)
        except Exception as error:
            unstorable = isinstance(error, Unstorable)
            self._release([(content, size)], dropped=delivery.REDACTION if unstorable else delivery.FAULT)
            if not unstorable:
                faults.fault("recording.convert", error)
            return
        finally:
            self._read += 1
        if not records:
            self._release([(content, size)])
            return
        if self._telemetry is not None:
            self._telemetry.saw(content, records)
        # Only the last record carries the size, so the bytes are freed once, when all records of the item are written.
        sized += [(record, 0) for record in records[:-1]]
        sized.append((records[-1], size))

    def _deliver(self) -> None:
        from art_patch.types import ENGINE_FULL, Call  # the converter has made the class by now; `patch()` must not

        written, poison = self._delivery.attempt(time.monotonic())
        for record, _ in written:
            if isinstance(record, Call) and record.shadow_of is None:
                self.counts.recorded += 1
                self.counts.served_by_policy += record.policy is not UPSTREAM
                self.counts.fallbacks += record.fallback is not None
                self.counts.engine_full += (record.fallback or "").endswith(ENGINE_FULL)
        self._release(written)
        self._release(poison, dropped=delivery.REFUSED)
        if not self._delivery.pending:
            for marker in self._flushes:
                marker.written.set()
            self._flushes.clear()
        else:
            self._flushes = [marker for marker in self._flushes if not marker.given_up]

    def _release(self, sized: Sequence[tuple[Exchange | Record, int]], dropped: str | None = None) -> None:
        """Free the queue's bytes of what was written, or dropped for a cause."""
        with self._lock:
            for item, size in sized:
                self._bytes -= size
                if size:
                    self._waiting.add(item, -1)
                if dropped is not None:
                    self._drop(item, dropped)

    def _drop(self, item: Exchange | Record, cause: str) -> None:
        self.dropped += 1
        self._lost.setdefault(cause, Tally()).add(item)

    def _tick(self) -> None:
        try:
            self._on_tick()
        except Exception as error:
            faults.fault("recording.tick", error)


_graveyard: list[Delivery] = []
