"""Counts what a recorder holds, in bytes and in records, what it wrote, and what was lost and why."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from art_patch._lib.os_threads import RLock
from art_patch.types import UPSTREAM

if TYPE_CHECKING:
    from art_patch.recording.delivery import Waiting

# The causes of a loss, as they are counted and reported.
QUEUE_FULL = "the queue was full; raise queue_mib (ART_PATCH_QUEUE_MIB)"
REDACTION = "redaction failed; mend the function that `redact` names"
FAULT = "of a fault in art_patch; the logger art_patch shows it at level DEBUG, please report it"
REFUSED = "the store refuses them; the logger art_patch shows why at level DEBUG"
SLOW = "the store had not taken it all when the exit stopped waiting; call art_patch.flush(60) before the program ends"


def unwritable(trouble: str) -> str:
    """Return the cause to report for records that are lost because the store fails; `trouble`: class of its error."""
    return f"the store cannot be written ({trouble}); `art-patch doctor` says why"


class Tally:
    """A number of calls and a number of other records, as they are counted when records are lost."""

    __slots__ = ("calls", "others")

    def __init__(self) -> None:
        self.calls = 0
        self.others = 0

    def __bool__(self) -> bool:
        """Whether anything was counted."""
        return bool(self.calls or self.others)

    def add(self, kind: str, number: int = 1) -> None:
        """Count an item of the queue, or the record that was made of the item, by the name of its class."""
        # By name: only the recorder's thread imports the classes of records.
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
    return ". ".join(f"{tally} not recorded, because {cause}" for cause, tally in losses.items() if tally)


def say(line: str) -> None:
    """Write a line to stderr, if there is one. Never raises."""
    # It runs while the interpreter exits: stderr may be closed, `None` (under pythonw), or an object of the app.
    with suppress(Exception):
        print(line, file=sys.stderr, flush=True)


@dataclass(slots=True)
class Counts:
    """Numbers of the app's calls that were written to the store."""

    recorded: int = 0
    served_by_policy: int = 0
    fallbacks: int = 0


class Accounts:
    """The calls and other records of one recorder: those that are not written yet, and those that were lost.

    Attributes:
        counts: the app's calls that were written.
        held_bytes: bytes of the items and records in memory.
        unwritten: number of items that are neither in the store nor dropped.
        waiting: what would be lost if the process were killed now.
        spooled: what is in the spool and not in the store.
        lost: what was dropped, by its cause.
    """

    def __init__(self, most_bytes: int) -> None:
        """Start with nothing; `most_bytes` may be held in memory."""
        # A native lock, see `_lib.os_threads`. Re-entrant, because the garbage collector may finalise a stream, and so
        # call `take`, in the middle of a `take` of the same thread.
        self.lock = RLock()
        self._most_bytes = most_bytes
        self.counts = Counts()
        self.held_bytes = 0
        self.unwritten = 0
        self.waiting = Tally()
        self.spooled = Tally()
        self.lost: dict[str, Tally] = {}
        self.dropped = 0

    def take(self, kind: str, size: int) -> bool:
        """Count an item that is queued now; return false if it is dropped because there is no room for it."""
        with self.lock:
            # The newest call is dropped, not the oldest: that costs the caller nothing, while making room would free
            # other calls' bytes in its time. Trajectories that began before the trouble stay whole.
            if self.held_bytes + size > self._most_bytes:
                self._drop(kind, QUEUE_FULL)
                return False
            self.held_bytes += size
            self.unwritten += 1
            self.waiting.add(kind)
        return True

    def keep(self, entries: Iterable[Waiting]) -> None:
        """Count those that are in the spool now, and free the bytes of those that left the memory."""
        with self.lock:
            for entry in entries:
                if entry.size and entry.span is not None:
                    self.held_bytes -= entry.size - entry.held
                    self.waiting.add(entry.kind, -1)
                    self.spooled.add(entry.kind)

    def wrote(self, entries: Sequence[Waiting]) -> None:
        """Count calls that are in the store now, and free their bytes."""
        from art_patch.types import Call  # the converter has made the class by now; `patch()` must not

        for record in (entry.record for entry in entries):
            if isinstance(record, Call) and record.shadow_of is None:
                self.counts.recorded += 1
                self.counts.served_by_policy += record.policy is not UPSTREAM
                self.counts.fallbacks += record.fallback is not None
        self.release(entries)

    def release(self, entries: Iterable[Waiting], dropped: str | None = None) -> None:
        """Free the bytes of what was written, or dropped for a cause."""
        with self.lock:
            for entry in entries:
                self.held_bytes -= entry.held
                if entry.size:
                    self.unwritten -= 1
                    (self.waiting if entry.span is None else self.spooled).add(entry.kind, -1)
                if dropped is not None:
                    self._drop(entry.kind, dropped)

    def forget(self, kind: str, size: int, dropped: str | None = None) -> None:
        """Free the bytes of an item of which there is no record, or which is dropped for a cause."""
        with self.lock:
            self.held_bytes -= size
            self.unwritten -= 1
            self.waiting.add(kind, -1)
            if dropped is not None:
                self._drop(kind, dropped)

    def _drop(self, kind: str, cause: str) -> None:
        self.dropped += 1
        self.lost.setdefault(cause, Tally()).add(kind)
