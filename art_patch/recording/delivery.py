"""Writes batches of records to the store, keeps them while the store is down, and counts the records that were lost.

A batch that fails is cut in half and tried again with back-off, so that one record that the store refuses cannot hold
up the others. A single record that fails while others are written is dropped and counted, unless the disk is full or
the store out of reach: then a large record may fail and a small one succeed. Calls of the store may block, so only the
recorder's thread makes them.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, TypeAlias

from art_patch._lib.faults import faults
from art_patch.errors import StoreError

if TYPE_CHECKING:
    from art_patch.types import Record


FIRST_RETRY_S = 0.5
MAX_RETRY_S = 30.0
# With a hundred records, writing is a third faster, but holds the interpreter three times as long.
BATCH_RECORDS = 32

# A record, and the bytes of the queue that it holds until it is written or dropped.
Sized: TypeAlias = "tuple[Record, int]"


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
        self._batches: deque[list[Sized]] = deque()
        self._failures = 0
        self.sink: Sink | None = None
        self.retry_at = 0.0
        self.trouble: str | None = None
        # How often the store was opened or took a batch.
        self.steps = 0

    @property
    def pending(self) -> bool:
        """Whether any batch waits to be written."""
        return bool(self._batches)

    def add(self, records: Sequence[Sized]) -> None:
        """Append records to those that wait, in batches of at most `BATCH_RECORDS`."""
        for start in range(0, len(records), BATCH_RECORDS):
            self._batches.append(list(records[start : start + BATCH_RECORDS]))

    def attempt(self, now: float) -> tuple[list[Sized], list[Sized]]:
        """Try to write the waiting batches. Return the records that were written, and those that are dropped."""
        written, poison, failed = list[Sized](), list[Sized](), list[tuple[list[Sized], Exception]]()
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
                middle = (len(batch) + 1) // 2
                self._batches.extend(half for half in (batch[:middle], batch[middle:]) if half)
        if failed:
            # The wait doubles with each failure: 0.5 s, 1 s, and so on up to 30 s.
            self.retry_at = now + min(MAX_RETRY_S, FIRST_RETRY_S * 2**self._failures)
            self._failures = min(self._failures + 1, 10)
        else:
            self._failures, self.retry_at, self.trouble = 0, 0.0, None
        return written, poison

    def close(self) -> None:
        """Close the sink. The next attempt opens it again."""
        sink, self.sink = self.sink, None
        if (close := getattr(sink, "close", None)) is not None:
            close()

    def _write(self, batch: list[Sized]) -> Exception | None:
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


# The causes of a loss, as they are counted and reported.
QUEUE_FULL = "the queue was full; raise queue_mib (ART_PATCH_QUEUE_MIB)"
REDACTION = "redaction failed; mend the function that `redact` names"
FAULT = "of a fault in art_patch; the logger art_patch shows it at level DEBUG, please report it"
REFUSED = "the store refuses them; the logger art_patch shows why at level DEBUG"
SLOW = "the store had not taken it all when the exit stopped waiting; call art_patch.flush(60) before the program ends"


def unwritable(trouble: str) -> str:
    """Return the cause to report for records that are lost because the store fails; `trouble`: class of its error."""
    return f"the store cannot be written ({trouble}); `art-patch doctor` says why"


def full_because(trouble: str | None) -> str:
    """Return the cause of a loss by a full queue, with the class of the store's error if it could not be written."""
    if trouble is None:
        return QUEUE_FULL
    return f"the store could not be written ({trouble}) until the queue was full; `art-patch doctor` says why"


class Tally:
    """A number of calls and a number of other records, as they are counted when records are lost."""

    __slots__ = ("calls", "others")

    def __init__(self) -> None:
        self.calls = 0
        self.others = 0

    def add(self, item: object, number: int = 1) -> None:
        """Count an item of the queue, or the record that was made of the item, as a call or as another record."""
        kind = type(item).__name__  # by name: only the recorder's thread imports the classes of records
        if kind in ("Exchange", "Call"):
            self.calls += number
        elif kind != "AppReport":
            self.others += number

    def __str__(self) -> str:
        """Return the numbers in words; empty if both are zero."""
        calls = f"{self.calls} call{'s' * (self.calls != 1)}" if self.calls else ""
        others = f"{self.others} other record{'s' * (self.others != 1)}" if self.others else ""
        return " and ".join(part for part in (calls, others) if part)


def sentence(losses: dict[str, Tally]) -> str:
    """Return sentences that say how many records were lost and why, without the final full stop; empty if none was."""
    parts = [f"{lost} not recorded, because {cause}" for cause, tally in losses.items() if (lost := str(tally))]
    return ". ".join(parts)


def say(line: str) -> None:
    """Write a line to stderr, if there is one. Never raises."""
    # It runs while the interpreter exits: stderr may be closed, `None` (under pythonw), or an object of the app.
    with suppress(Exception):
        print(line, file=sys.stderr, flush=True)
