"""Puts records into the spool, where they survive the process, and then writes them to the store in batches.

While the store is slow or down, records beyond `MEMORY_BYTES` stay on the disk alone and are read back later. Without a
spool, they wait in memory.

A batch that fails is cut in half and tried again with back-off, so that one record that the store refuses cannot hold
up the others. A single record that fails while others are written is dropped and counted. So are all records if the
store belongs to another project. Calls of the store may block, so only the recorder's thread makes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

from art_patch._lib.faults import faults
from art_patch.errors import WrongProject

if TYPE_CHECKING:
    from art_patch.store import Span, Spool
    from art_patch.types import Record


FIRST_RETRY_S = 0.5
MAX_RETRY_S = 30.0
# With a hundred records, writing is a third faster, but holds the interpreter three times as long.
BATCH_RECORDS = 32
# While the app makes more calls than the store takes, one batch is written so often; the rest waits in the spool.
BUSY_WRITE_S = 1.0
# Records that are in the spool are kept in memory, too, up to this size: then they need not be read back.
MEMORY_BYTES = 4 << 20

# A record, and the bytes of the queue that it holds.
Sized: TypeAlias = "tuple[Record, int]"


class Sink(Protocol):
    """The destination of records: the store, or a stand-in in tests."""

    def write(self, records: Sequence[Record]) -> object:
        """Write all of the records or none."""
        ...


@dataclass(slots=True)
class Waiting:
    """A record that the store does not have yet.

    Attributes:
        record: the record; `None` while it is only in the spool.
        kind: name of the record's class.
        size: bytes of the item of the queue whose last record it is; 0 for other records.
        span: where it is in the spool; `None` if it is only in memory.
        held: bytes of memory that it holds until it is written or dropped.
    """

    record: Record | None
    kind: str
    size: int
    span: Span | None
    held: int


class Delivery:
    """The records that wait for the store. Only the recorder's thread uses this object."""

    def __init__(
        self,
        open_sink: Callable[[], Sink],
        breathe: Callable[[], None] = lambda: None,
        spool: Spool | None = None,
    ) -> None:
        """Open the sink at the first attempt. `breathe()` is called after each batch that was written."""
        self._open_sink = open_sink
        self._breathe = breathe
        self.spool = spool
        self._batches: deque[list[Waiting]] = deque()
        self._in_memory = 0
        self._failures = 0
        self.sink: Sink | None = None
        self.due_at = inf
        """When the next attempt is due, in monotonic seconds; infinite while nothing waits."""
        self._not_before = 0.0
        self.trouble: str | None = None
        # How often the store was opened or took a batch.
        self.steps = 0

    @property
    def pending(self) -> bool:
        """Whether any record waits to be written."""
        return bool(self._batches)

    @property
    def takes_more(self) -> bool:
        """Whether more records may be added without filling the memory: the store takes them, or the spool does."""
        return not self._failures or (self.spool is not None and self.spool.trouble is None)

    def add(self, sized: Sequence[Sized], due_at: float) -> list[Waiting]:
        """Spool records and let them wait, the first until `due_at`; return them. Those in the spool have a `span`."""
        spans: Sequence[Span | None] = [None] * len(sized)
        if self.spool is not None:
            spans = self.spool.append([record for record, _ in sized])
        entries: list[Waiting] = []
        for (record, size), span in zip(sized, spans, strict=True):
            spilled = span is not None and self._in_memory > MEMORY_BYTES
            held = 0 if spilled else size
            entries.append(Waiting(None if spilled else record, type(record).__name__, size, span, held))
            self._in_memory += held
        if not self._batches:
            self.due_at = max(due_at, self._not_before)
        self._batches += (entries[start : start + BATCH_RECORDS] for start in range(0, len(entries), BATCH_RECORDS))
        return entries

    def attempt(self, now: float, hurries: Callable[[], bool] = lambda: False) -> tuple[list[Waiting], list[Waiting]]:
        """Try to write the waiting batches. Return what was written, and what is dropped.

        If `hurries()` says after a batch that there is something more urgent, the next one waits for `BUSY_WRITE_S`.
        """
        written: list[Waiting] = []
        poison: list[Waiting] = []
        failed: list[list[Waiting]] = []
        for _ in range(len(self._batches)):
            batch = self._batches.popleft()
            try:
                done = self._write(batch)
            except WrongProject as error:  # this store will never take these records
                faults.trouble("store.write", error)
                poison += batch
                continue
            if done:
                written += batch
                self._breathe()
                if not failed and hurries():
                    self._not_before = now + BUSY_WRITE_S
                    break
            else:
                failed.append(batch)
                if len(failed) > 1 and not written:
                    break  # the store is down: trying every batch would only take time
        for batch in failed:
            # Others were written, so this record is at fault and not the store.
            if len(batch) == 1 and written:
                poison += batch
            else:
                middle = (len(batch) + 1) // 2
                self._batches.extend(half for half in (batch[:middle], batch[middle:]) if half)
        if failed:
            # The wait doubles with each failure: 0.5 s, 1 s, and so on up to 30 s.
            self.due_at = now + min(MAX_RETRY_S, FIRST_RETRY_S * 2**self._failures)
            self._failures = min(self._failures + 1, 10)
        else:
            self._failures, self.trouble = 0, None
            self.due_at = self._not_before if self._batches else inf
        self._in_memory -= sum(entry.held for entry in (*written, *poison))
        self._note_done()
        return written, poison

    def close(self) -> None:
        """Close the sink and the spool. The next attempt opens them again."""
        sink, self.sink = self.sink, None
        if (close := getattr(sink, "close", None)) is not None:
            close()
        if self.spool is not None and not self._batches:
            self.spool.close()

    def _note_done(self) -> None:
        """Tell the spool what is in the store, or dropped, so that no other process writes it."""
        if self.spool is not None:
            spans = (entry.span for batch in self._batches for entry in batch if entry.span is not None)
            first = min(spans, key=lambda span: span.start, default=None)
            self.spool.done(None if first is None else first.start)

    def _write(self, batch: list[Waiting]) -> bool:
        try:
            if self.sink is None:
                self.sink = self._open_sink()
                self.steps += 1
            self.sink.write(self._records(batch))
            self.steps += 1
        except WrongProject:
            raise
        except Exception as error:
            self.trouble = type(error).__name__
            faults.trouble("store.write", error)
            return False
        return True

    def _records(self, batch: list[Waiting]) -> list[Record]:
        spilled = [entry for entry in batch if entry.record is None]
        if spilled and self.spool is not None:
            read = self.spool.read([entry.span for entry in spilled if entry.span is not None])
            for entry, record in zip(spilled, read, strict=True):
                entry.record = record  # they are released after this batch
        return [cast("Record", entry.record) for entry in batch]
