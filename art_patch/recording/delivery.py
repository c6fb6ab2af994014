"""Writes batches of records to the store, and keeps them while the store is down.

A batch that fails is cut in half and tried again with back-off, so that one record that the store refuses cannot hold
up the others. A single record that fails while others are written is dropped and counted, unless the disk is full or
the store out of reach: then a large record may fail and a small one succeed. Calls of the store may block, so only the
recorder's thread makes them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from art_patch._lib.faults import faults
from art_patch.errors import StoreError

if TYPE_CHECKING:
    from art_patch.recording.exchange import Exchange
    from art_patch.recording.spool import SpoolFile
    from art_patch.types import Record


FIRST_RETRY_S = 0.5
MAX_RETRY_S = 30.0
AWAITED_RETRY_S = 1.0  # the longest pause while a caller waits for what is queued
# With a hundred records, writing is a third faster, but holds the interpreter three times as long.
BATCH_RECORDS = 32


@dataclass(eq=False, slots=True)
class Item:
    """A call or another record on its way to the store.

    Attributes:
        content: the call or record; `None` if it is kept in the spool alone.
        size: bytes of memory that it holds.
        kind: name of its class, as losses are counted by it.
        place: where it is in the spool; `None` if it is in memory alone.
        records: what was made of it for the spool, if texts had to be removed before.
    """

    content: Exchange | Record | None
    size: int
    kind: str
    place: tuple[SpoolFile, int] | None = None
    records: list[Record] | None = None


# A record, and with the last record of an item the item, which is finished when the record is written or dropped.
Waiting: TypeAlias = "tuple[Record, Item | None]"


class Sink(Protocol):
    """The destination of records: the store, or a stand-in in tests."""

    def write(self, records: Sequence[Record]) -> object:
        """Write all of the records or none."""
        ...


class Delivery:
    """The batches that wait for the store. Only the recorder's thread uses this object."""

    def __init__(self, open_sink: Callable[[], Sink], breathe: Callable[[], None] = lambda: None) -> None:
        """Open the sink at the first attempt. `breathe()` is called after each batch that was written."""
        self._open_sink = open_sink
        self._breathe = breathe
        self._batches: deque[list[Waiting]] = deque()
        self._failures = 0
        self.sink: Sink | None = None
        self.retry_at = 0.0
        self._tried_at = 0.0
        self.trouble: str | None = None
        # How often the store was opened or took a batch.
        self.steps = 0

    @property
    def pending(self) -> bool:
        """Whether any batch waits to be written."""
        return bool(self._batches)

    def next_try(self, *, awaited: bool) -> float:
        """Return when to try again: sooner if a caller waits, because the store may be back long before `retry_at`."""
        return min(self.retry_at, self._tried_at + AWAITED_RETRY_S) if awaited else self.retry_at

    def add(self, records: Sequence[Waiting]) -> None:
        """Append records to those that wait, in batches of at most `BATCH_RECORDS`."""
        for start in range(0, len(records), BATCH_RECORDS):
            self._batches.append(list(records[start : start + BATCH_RECORDS]))

    def attempt(self, now: float) -> tuple[list[Waiting], list[Waiting]]:
        """Try to write the waiting batches. Return the records that were written, and those that are dropped."""
        # A try for a caller who waits comes early: of a store that is down, it cuts no batch and lengthens no pause.
        is_due = now >= self.retry_at
        written, poison, failed = list[Waiting](), list[Waiting](), list[tuple[list[Waiting], Exception]]()
        for _ in range(len(self._batches)):
            batch = self._batches.popleft()
            if (error := self._write(batch)) is None:
                written += batch
                self._breathe()
            else:
                failed.append((batch, error))
                if len(failed) > 1 and not written:
                    break  # the store is down: trying every batch would only take time
        for batch, error in failed:
            # Others were written, so this record is at fault and not the store.
            if len(batch) == 1 and written and not (isinstance(error, StoreError) and error.may_pass):
                poison += batch
            else:
                middle = (len(batch) + 1) // 2 if is_due or written else len(batch)
                self._batches.extend(half for half in (batch[:middle], batch[middle:]) if half)
        if failed and is_due:
            # The wait doubles with each failure: 0.5 s, 1 s, and so on up to 30 s.
            self.retry_at = now + min(MAX_RETRY_S, FIRST_RETRY_S * 2**self._failures)
            self._failures = min(self._failures + 1, 10)
        elif not failed:
            self._failures, self.retry_at, self.trouble = 0, 0.0, None
        self._tried_at = time.monotonic()
        return written, poison

    def close(self) -> None:
        """Close the sink. The next attempt opens it again."""
        sink, self.sink = self.sink, None
        if (close := getattr(sink, "close", None)) is not None:
            close()

    def _write(self, batch: list[Waiting]) -> Exception | None:
        try:
            if self.sink is None:
                self.sink = self._open_sink()
                self.steps += 1
            self.sink.write([record for record, _ in batch])
            self.steps += 1
        except Exception as error:
            self.trouble = type(error).__name__
            faults.trouble("store.write", error)
            return error
        return None
