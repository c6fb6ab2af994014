"""Batches that wait for the store: kept while it is down, tried again with back-off, poison picked out.

A batch that fails is cut in half before it is tried again, so that one record which the store will never take cannot
hold up the others for ever. A single record that fails while others get through is dropped and counted, and so is
whatever was meant for the store of another project. The store's calls may block; only the writer thread is behind them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from art_patch._lib.faults import faults
from art_patch.errors import WrongProject

if TYPE_CHECKING:
    from art_patch.types import Record

FIRST_RETRY_S = 0.5
MAX_RETRY_S = 30.0
BATCH_RECORDS = 32
"""Three quarters of the speed of a hundred, and the interpreter is the app's again three times as often."""

Sized: TypeAlias = "tuple[Record, int]"
"""A record and the bytes of the queue that it holds until it is written or dropped."""


class Sink(Protocol):
    """Where records go: the store, or a stand-in."""

    def write(self, records: Sequence[Record]) -> object:
        """Write all of the records or none."""
        ...


class Delivery:
    """Owned by the writer thread."""

    def __init__(self, open_sink: Callable[[], Sink], breathe: Callable[[], None] = lambda: None) -> None:
        """Open the sink at the first attempt, not before; `breathe()` is called after each batch."""
        self._open_sink = open_sink
        self._breathe = breathe
        self._batches: deque[list[Sized]] = deque()
        self._failures = 0
        self.sink: Sink | None = None
        self.retry_at = 0.0
        self.trouble: str | None = None
        self.steps = 0
        """How often the store was opened or took a batch."""

    @property
    def pending(self) -> bool:
        """Whether anything is waiting."""
        return bool(self._batches)

    def add(self, records: Sequence[Sized]) -> None:
        """Append records, in batches."""
        for start in range(0, len(records), BATCH_RECORDS):
            self._batches.append(list(records[start : start + BATCH_RECORDS]))

    def attempt(self, now: float) -> tuple[list[Sized], list[Sized]]:
        """Try what waits; return what was written and what was given up as poison."""
        written: list[Sized] = []
        poison: list[Sized] = []
        failed: list[list[Sized]] = []
        for _ in range(len(self._batches)):
            batch = self._batches.popleft()
            try:
                done = self._write(batch)
            except WrongProject as error:  # nothing of ours belongs into that store, now or later
                faults.trouble("store.write", error)
                poison += batch
                continue
            if done:
                written += batch
                self._breathe()
            else:
                failed.append(batch)
                if len(failed) > 1 and not written:
                    break  # the store is down; do not try every batch against it
        for batch in failed:
            if len(batch) == 1 and written:
                poison += batch
            else:
                middle = (len(batch) + 1) // 2
                self._batches.extend(half for half in (batch[:middle], batch[middle:]) if half)
        if failed:
            self.retry_at = now + min(MAX_RETRY_S, FIRST_RETRY_S * 2**self._failures)
            self._failures = min(self._failures + 1, 10)
        else:
            self._failures, self.retry_at, self.trouble = 0, 0.0, None
        return written, poison

    def close(self) -> None:
        """Close the sink, if it is open and can be closed; the next attempt opens it again."""
        sink, self.sink = self.sink, None
        close = getattr(sink, "close", None)
        if close is not None:
            close()

    def _write(self, batch: list[Sized]) -> bool:
        try:
            if self.sink is None:
                self.sink = self._open_sink()
                self.steps += 1
            self.sink.write([record for record, _ in batch])
            self.steps += 1
        except WrongProject:
            raise
        except Exception as error:
            self.trouble = type(error).__name__
            faults.trouble("store.write", error)
            return False
        return True
