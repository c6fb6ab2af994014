"""The thread that writes each item to the spool before the recorder's thread reads it.

It imports little and opens no database, so a call is safe a few milliseconds after its end, whatever the store does.
An item whose frame is written is kept in memory as well while there is room; beyond that the recorder's thread reads it
back. What cannot be written (a full disk, a file system without locks) goes on in memory alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias, cast

from pydantic_core import to_json

from art_patch._lib.faults import faults
from art_patch._lib.forking import late_import
from art_patch._lib.os_threads import Empty, Flag, NativeThread, Queue, RLock
from art_patch.recording.delivery import Item
from art_patch.recording.exchange import Exchange
from art_patch.recording.spool import FILE_BYTES, SpoolFile, create
from art_patch.settings import Settings
from art_patch.store import waits_for_network

if TYPE_CHECKING:
    from art_patch.types import Record

# How long the thread waits for further items after the first one: one write for all, and few switches of threads.
GATHER_S = 0.004
GATHER_ITEMS = 100

# The recorder's thread, which imports far more, waits for the spooler's imports, but at most so long.
SPOOLER_FIRST_S = 1.0

# Then it waits for so long again. Its imports would keep the interpreter from the spooler, and a process that ends
# sooner does not need them: the next one, or any command, takes over what is in the spool.
FIRST_MOMENTS_S = 0.3

_TRY_AGAIN_S = 10.0
_IDLE_S = 3600.0


@contextmanager
def counted(place: str) -> Generator[None]:
    """Count an error in the block, and go on: what the system refuses (disk, open files) as no fault of art_patch."""
    try:
        yield
    except (OSError, ImportError) as error:  # without a free file number, a module is not found
        faults.trouble(place, error)
    except Exception as error:
        faults.fault(place, error)


class Mark:
    """A mark between items. `safe` is set when what is before it is in the spool, `written` when it is in the store."""

    def __init__(self, *, ends: bool = False) -> None:
        """`ends`: the spooler's thread ends here."""
        self.safe, self.written = Flag(), Flag()
        self.ends = ends
        self.given_up = False


Passed: TypeAlias = "Item | Mark"


class Spooler:
    """The files of one recorder, and the thread that writes them."""

    def __init__(
        self, settings: Settings, convert: Callable[[Item], list[Record] | None], forward: Callable[[Passed], None]
    ) -> None:
        """Start without a file and without a thread.

        Args:
            convert: makes the redacted records of an item, if the app redacts; `None`: it has dropped the item.
            forward: takes each item, written or not, in their order.
        """
        self._settings = settings
        self._convert = convert
        self._forward = forward
        self._most_bytes = settings.spool_mib << 20
        self._inbox: Queue[Passed] = Queue()
        self._nudge = Flag()
        # Held while frames are written and while files change, so never waited for by the app's threads.
        self._lock = RLock()
        self._files: list[SpoolFile] = []
        self._not_before = 0.0
        self._thread: NativeThread | None = None
        self._ready = Flag()
        self._imported = False

    # What the app's threads call.

    def put(self, item: Passed) -> None:
        """Queue an item or a mark; never waits."""
        self._inbox.put(item)
        if isinstance(item, Mark):
            self._nudge.set()

    @property
    def running(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None

    def start(self) -> None:
        """Start the thread; raises what `NativeThread.start` raises."""
        self._thread = thread = NativeThread(self._run, "art_patch-spool")
        try:
            thread.start()
        except BaseException:
            self._thread = None
            raise

    # What the recorder's thread calls.

    @property
    def is_nearly_full(self) -> bool:
        """Whether so much waits in the spool that writing it to the store cannot wait for a quiet time."""
        return sum(file.end for file in list(self._files)) > self._most_bytes // 2

    def wait_for_first_moments(self, hurry: Flag) -> None:
        """Wait until the thread has imported what it needs, and for the app's first moments unless `hurry` is set."""
        self._ready.wait(SPOOLER_FIRST_S)
        self._ready.set()  # `wait` lowered it
        # Only the recorder's thread reads a route that lies behind a network, so there it begins at once.
        if not waits_for_network(self._settings.store) and hurry.wait(FIRST_MOMENTS_S):
            hurry.set()  # `wait` lowered it

    @property
    def is_whole(self) -> bool:
        """Whether nobody has deleted a file, or cut it off."""
        with self._lock:
            return not any(file.is_gone for file in self._files)

    def finished(self, items: Sequence[Item]) -> None:
        """Note that items are in the store, or dropped."""
        places: dict[SpoolFile, list[int]] = {}
        for item in items:
            if item.place is not None:
                places.setdefault(item.place[0], []).append(item.place[1])
        with self._lock, counted("recording.spool"):
            for file, at in places.items():
                file.finished(at)
                if file.is_empty and file in self._files[:-1]:
                    self._files.remove(file)
                    file.remove()

    def close(self) -> None:
        """Remove the file if the store has all of it. The next item begins another one."""
        with self._lock, counted("recording.spool"):
            if len(self._files) == 1 and self._files[0].is_empty:
                self._files.pop().remove()

    # What the thread does.

    def _run(self) -> None:
        try:
            with counted("recording.spooler"):
                self._import()
            self._ready.set()
            while self._pass_on(self._gathered()):
                pass
        except Exception as error:
            faults.fault("recording.spooler", error)
        finally:
            self._thread = None
            self._ready.set()
        with suppress(RuntimeError):  # the interpreter is going down
            if not self._inbox.empty():
                self.start()  # an item was queued after the mark, when the recorder saw a thread

    def _import(self) -> None:
        if not self._imported:
            with late_import():
                for name in ("chat", "frames", "redaction"):
                    import_module(f"art_patch.recording.{name}")
                # For its first dataclass pydantic_core imports a module too, behind a lock that it never lets go of in
                # a child that was forked meanwhile.
                to_json(import_module("art_patch.recording.chat").Asked())
            import_module("art_patch.recording.frames").reader("chat")
            self._imported = True

    def _gathered(self) -> list[Passed]:
        while True:
            try:
                found = [self._inbox.get(_IDLE_S)]
                break
            except Empty:
                continue
        self._nudge.wait(GATHER_S)
        while len(found) < GATHER_ITEMS and not self._inbox.empty():
            found.append(self._inbox.get())
        return found

    def _pass_on(self, gathered: Sequence[Passed]) -> bool:
        """Write the items and forward all; return false if the thread is to end."""
        passed: list[Passed] = []
        framed: list[tuple[Item, bytes]] = []
        for each in gathered:
            if isinstance(each, Mark):
                passed.append(each)
                continue
            body: bytes | None = b""
            with counted("recording.frame"):
                body = self._frame(each)
            if body is not None:
                passed.append(each)
            if body:
                framed.append((each, body))
        with counted("recording.spool"):
            self._write(framed)
        for each in passed:
            if isinstance(each, Mark):
                each.safe.set()
            self._forward(each)
        return not any(isinstance(each, Mark) and each.ends for each in passed)

    def _frame(self, item: Item) -> bytes | None:
        self._import()
        from art_patch.recording.frames import encode_call, encode_records

        if self._settings.redact is not None:
            item.records = self._convert(item)
            return None if item.records is None else encode_records(item.records)
        if isinstance(item.content, Exchange):
            return encode_call(item.content)
        return encode_records([cast("Record", item.content)])

    def _write(self, framed: Sequence[tuple[Item, bytes]]) -> None:
        now = time.monotonic()
        if not framed or now < self._not_before:
            return
        bodies = [body for _, body in framed]
        try:
            with self._lock:
                if sum(file.end for file in self._files) + sum(map(len, bodies)) > self._most_bytes:
                    return
                if not self._files or self._files[-1].end > FILE_BYTES or self._files[-1].is_gone:
                    # What was redacted has been sampled before.
                    rate = self._settings.sample_rate if self._settings.redact is None else 1.0
                    self._files.append(create(self._settings, to_json({"sample_rate": rate})))
                file = self._files[-1]
                places = file.append(bodies)
        except OSError:
            self._not_before = now + _TRY_AGAIN_S
            raise
        for (item, _), place in zip(framed, places, strict=True):
            item.place = (file, place)
