"""The queue between the app's threads and the store, and the thread behind it.

The app's thread only runs `put()`: a size check and one append. It never waits, and may be called from anywhere, even
from the garbage collector. The recorder's thread starts with the first call, or in `patch()` if the store is behind a
network. It collects items for `flush_interval_s`, parses them, and writes them in batches; every `poll_interval_s` it
also calls `on_tick`. Before, each item passes the spooler, which keeps it in a file until the store has it. Each call
is either recorded, or dropped and counted, or still waiting. A forked child has an empty queue, new locks, its own
threads, files and connection.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, cast

from art_patch._lib.faults import Unstorable, faults
from art_patch._lib.forking import late_import, steps
from art_patch._lib.os_threads import Empty, Flag, NativeThread, Queue, RLock
from art_patch.recording import accounting, process
from art_patch.recording.accounting import Account, Counts
from art_patch.recording.delivery import Delivery, Item, Sink, Waiting
from art_patch.recording.exchange import FIXED_SIZE, Exchange
from art_patch.recording.frames import decode
from art_patch.recording.spooler import Mark, Passed, Spooler, counted
from art_patch.settings import Settings
from art_patch.store import waits_for_network

if TYPE_CHECKING:
    from art_patch.recording.converting import Converter, OnShadow
    from art_patch.recording.spool import SpoolFile
    from art_patch.recording.takeover import Takeover
    from art_patch.recording.telemetry import Telemetry
    from art_patch.types import Record

COLLECT_RECORDS = 200
COLLECT_S = 0.25

PAUSE_S = 0.0001  # after each call that the thread reads and each batch that it writes; see `_breathe`
SATURATED_S = 0.002
GIVE_WAY_S = 0.05

# At the exit, an open store has so long to take what is in the spool, so that the next process need not.
LEAVES_AFTER_S = 0.25
EXIT_LOOKS_EVERY_S = 0.05


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
        self.generation = 0
        self._open_sink = open_sink
        self._on_tick = on_tick
        self._on_shadow = on_shadow
        self._begin()
        process.register(self)

    def _begin(self) -> None:
        # All of these are native locks, see `_lib.os_threads`. Re-entrant, because the garbage collector may finalise a
        # stream, and so call `put()`, in the middle of a `put()` of the same thread. There a plain lock, and so
        # `queue.Queue` or `threading.Event`, would wait for itself for ever.
        self._lock = RLock()
        self._queue: Queue[Passed] = Queue()
        self._nudge = Flag()
        self._stopping = False
        self._thread: NativeThread | None = None
        self.account = Account(self.settings.queue_mib << 20)
        self._gave_up = False
        self._read = 0
        self._marks: list[Mark] = []
        self._awaited: list[Mark] = []  # those that a caller waits for
        self._converter: Converter | None = None
        self._telemetry: Telemetry | None = None
        self._delivery = Delivery(self._open_sink or self._open_store, self._breathe)
        # A stand-in for the store has no files.
        self._spooler: Spooler | None = None
        if self._open_sink is None and self.settings.spool_mib:
            self._spooler = Spooler(self.settings, self._converted, self._spooled)
        self._pass_on = self._queue.put if self._spooler is None else self._spooler.put
        self._takeover: Takeover | None = None
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
        kind = type(item).__name__
        if not self.account.admit(kind, size, self.trouble):
            return False
        self._pass_on(Item(item, size, kind))
        if not self.running:
            self.ensure_running()
        return True

    def put_record(self, record: Record) -> bool:
        """Queue a record that needs no parsing; return false if it is dropped."""
        return self.put(record, FIXED_SIZE + len(repr(record)))

    @property
    def running(self) -> bool:
        """Whether the recorder's thread runs, which calls `on_tick`, and the spooler's."""
        return self._thread is not None and (self._spooler is None or self._spooler.running)

    def ensure_running(self) -> None:
        """Start the recorder's threads if they do not run."""
        if self.running:
            return
        with self._lock:
            try:
                if self._spooler is not None and not self._spooler.running:
                    self._spooler.start()
                if self._thread is not None:
                    return
                self._stopping = False
                process.write_before_the_app_ends()
                # Assigned before the start: the thread sets it to `None` when it ends, which may be at once.
                self._thread = thread = NativeThread(self._run, "art_patch-recorder")
                thread.start()
            except BaseException as error:
                self._thread = None
                if not isinstance(error, RuntimeError):  # too many threads, or the interpreter is going down
                    raise
                faults.trouble("recording.thread", error)

    def flush(self, timeout_s: float) -> bool:
        """Wait until the queued records are written; return false if that takes longer than `timeout_s`."""
        if self.account.unfinished == 0:
            return True
        with self._marked() as mark:
            self._nudge.set()
            return mark.written.wait(timeout_s)

    @contextmanager
    def _marked(self) -> Generator[Mark]:
        mark = Mark()
        try:
            self._awaited.append(mark)
            self._pass_on(mark)
            self.ensure_running()
            yield mark
        finally:
            mark.given_up = True
            with suppress(ValueError):  # a child that was forked while a caller waited has none
                self._awaited.remove(mark)

    def stop(self, timeout_s: float) -> bool:
        """Write the queued records and end the thread, until the next `put()`; return false if that takes too long."""
        deadline = time.monotonic() + timeout_s
        done = self.flush(timeout_s)
        thread = self._thread
        if thread is not None:
            self._stopping = True
            self._pass_on(Mark(ends=True))
            self._nudge.set()
            thread.join(max(0.0, deadline - time.monotonic()))
        return done

    @property
    def steps(self) -> int:
        """A number that grows with each import, call or batch of the thread. `end` waits for as long as it grows."""
        # While the store cannot be written, an import is a progress of the app alone.
        return self._read + self._delivery.steps + steps(imports=self.trouble is None)

    @property
    def dropped(self) -> int:
        """Number of records that were lost."""
        return self.account.dropped

    @property
    def losses(self) -> str:
        """How many records were lost and why, in sentences; empty if none was."""
        return self.account.losses()

    @property
    def trouble(self) -> str | None:
        """Class name of the store's error while writing fails; `None` while it works."""
        return self._delivery.trouble

    def end(self, deadline: float, latest: float) -> float:
        """Write the queued records before the process ends, and report on stderr those that were lost.

        Waiting ends at the monotonic time `deadline`, which each progress (`steps`) moves, but never beyond `latest`.
        Returns the moved deadline, for the next recorder of the process.
        """
        if self.account.unfinished:
            with self._marked() as mark:
                steps = self.steps
                is_safe = self._may_leave_it() and mark.safe.wait(deadline - time.monotonic())
                is_safe = is_safe and self.account.all_safe
                if is_safe and self._delivery.sink is None:
                    self._gave_up = True  # what is in the spool is not lost, and opening a store takes a second
                else:
                    self._nudge.set()
                    self._gave_up |= is_safe and not mark.written.wait(LEAVES_AFTER_S)
                while not (self._gave_up or mark.written.wait(EXIT_LOOKS_EVERY_S)):
                    if self.steps > steps:
                        steps, deadline = self.steps, min(time.monotonic() + process.EXIT_DEADLINE_S, latest)
                    self._gave_up = time.monotonic() >= deadline
        if not self._gave_up:
            self.stop(max(0.0, deadline - time.monotonic()))
        if self._spooler is not None:
            self._spooler.close()
        self.account.say(self.trouble)
        return deadline

    def _may_leave_it(self) -> bool:
        # Only this process can give a call to the app's tracer provider, after it has parsed it.
        traces = self.settings.otel == "auto" and "opentelemetry.sdk.trace" in sys.modules
        return self._spooler is not None and self._spooler.is_whole and not traces

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
            with counted("recording.loop"):
                if self._spooler is not None:
                    self._spooler.wait_for_first_moments(hurry=self._nudge)
                self._prepare()
                self._loop()
                if self._spooler is not None:
                    self._spooler.close()
                self._delivery.close()
                if self._telemetry is not None:
                    self._telemetry.close()
        finally:
            self._thread = None
        # A mark that says to end is no reason to begin again.
        if any(not getattr(each, "ends", False) for each in self._queue) and not self._delivery.pending:
            self.ensure_running()  # an item was queued after the last look at the queue, when `put()` saw a thread

    def _prepare(self) -> Converter:
        """Import what only the recorder's threads need, so that `patch()` and the app's first call are spared it."""
        settings = self.settings
        with late_import():  # which one thread enters at a time
            if self._converter is None:
                if settings.otel == "auto":
                    self._telemetry = import_module("art_patch.recording.telemetry").Telemetry()
                self._converter = import_module("art_patch.recording.converting").Converter(
                    sample_rate=settings.sample_rate, redact=settings.redact, on_shadow=self._on_shadow
                )
                if self._spooler is not None:
                    self._takeover = import_module("art_patch.recording.takeover").Takeover(settings)
            return cast("Converter", self._converter)

    def _loop(self) -> None:
        # Only this thread reads a store behind a network, so the first tick comes at once.
        wait_s = 0.0 if waits_for_network(self.settings.store) else self.settings.poll_interval_s
        tick_at = time.monotonic() + wait_s
        while True:
            now = time.monotonic()
            if now >= tick_at and not self._stopping:  # a tick queues a report, which would start the threads again
                with counted("recording.tick"):
                    self._on_tick()
                tick_at = now + self.settings.poll_interval_s
            if self._delivery.pending:
                # The store is down. Until it is back, what is queued stays as bytes, which are smaller than records.
                retry_at = self._delivery.next_try(awaited=bool(self._awaited))
                nudged = self._nudge.wait(max(0.0, min(retry_at, tick_at) - now))
                self._nudge.clear()
                if nudged or time.monotonic() >= retry_at:
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
        self._hurried = self._nudge.wait(0.0 if self._awaited else self.settings.flush_interval_s)
        waiting: list[Waiting] = []
        deadline = time.monotonic() + COLLECT_S
        self._sort(item, waiting)
        while not self._queue.empty() and len(waiting) < COLLECT_RECORDS and time.monotonic() < deadline:
            self._sort(self._queue.get(), waiting)
            self._breathe()
        self._delivery.add(waiting)
        self._deliver()

    def _breathe(self) -> None:
        """Let the app's threads run, unless a caller waits for a flush or the queue is over a quarter full."""
        spooler = self._spooler
        if self._hurried or self._awaited or self.account.is_crowded or (spooler and spooler.is_nearly_full):
            return
        # While this thread computes, the interpreter switches to another only every 5 ms, for which a call that ends
        # meanwhile would wait. A short pause is enough: who waits takes the interpreter, and keeps it until it waits.
        asked, computed_s = time.monotonic(), time.process_time()
        self._hurried = self._nudge.wait(PAUSE_S)
        waited_s = min(time.monotonic() - asked - PAUSE_S, time.process_time() - computed_s)
        if spooler is not None and not self._hurried and waited_s > SATURATED_S:
            # It waited for the app, which computed meanwhile, and not for other processes. What waits is safe.
            self._hurried = self._nudge.wait(GIVE_WAY_S)

    def _spooled(self, item: Passed) -> None:
        """Take an item that is in the spool, or could not be written there; the spooler's thread calls this."""
        if isinstance(item, Item) and item.place is not None:
            self.account.spooled(item)
        self._queue.put(item)
        if self._thread is None and isinstance(item, Item):
            self.ensure_running()  # it ended meanwhile

    def _converted(self, item: Item) -> list[Record] | None:
        """Return the records of an item; `None`, after it was counted as dropped, if there is a fault."""
        content = item.content
        try:
            if content is None:
                file, place = cast("tuple[SpoolFile, int]", item.place)
                content = decode(file.read(place) or b"", self)
            convert = (self._converter or self._prepare()).convert
            if not isinstance(content, list):
                return convert(content)
            # What was redacted was converted before.
            return content if self.settings.redact is not None else [each for one in content for each in convert(one)]
        except Exception as error:
            unstorable = isinstance(error, Unstorable)
            self._release([item], dropped=accounting.REDACTION if unstorable else accounting.FAULT)
            if not unstorable:
                faults.fault("recording.convert", error)
            return None
        finally:
            self._read += 1

    def _sort(self, item: Passed, waiting: list[Waiting]) -> None:
        if isinstance(item, Mark):
            self._marks.append(item)
            return
        records = self._converted(item) if item.records is None else item.records
        if records is None:
            return
        if not records:
            self._release([item])
            return
        if self._telemetry is not None:
            self._telemetry.saw(item.content, records)
        # Only the last record carries the item, which is finished when all of its records are written.
        waiting += [(record, None) for record in records[:-1]]
        waiting.append((records[-1], item))

    def _deliver(self) -> None:
        written, poison = self._delivery.attempt(time.monotonic())
        self.counts.add([record for record, _ in written])
        self._release([item for _, item in written if item is not None])
        for record, item in poison:
            self._release([] if item is None else [item])
            self.account.lose(type(record).__name__, accounting.REFUSED)
        if not self._delivery.pending:
            for mark in self._marks:
                mark.written.set()
            self._marks.clear()
            if self._takeover is not None and self._delivery.sink is not None:
                self._takeover.look(self._delivery.sink, self._breathe)
        else:
            self._marks = [mark for mark in self._marks if not mark.given_up]

    def _release(self, items: Sequence[Item], dropped: str | None = None) -> None:
        """Free the memory and the spool of what was written, or dropped for a cause."""
        self.account.finish(items, dropped)
        if self._spooler is not None:
            self._spooler.finished(items)


_graveyard: list[Delivery] = []
