"""Counts what waits in memory, so that it stays bounded, and the records that were lost, by cause, and says so."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from art_patch._lib.os_threads import RLock
from art_patch.types import ENGINE_FULL, UPSTREAM

if TYPE_CHECKING:
    from art_patch.recording.delivery import Item
    from art_patch.types import Call, Record

# So many bytes of what the spool has are kept in memory as well, which saves reading them back.
KEPT_BYTES = 4 << 20

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

    def add(self, kind: str, number: int = 1) -> None:
        """Count an item as a call or as another record, by the name of its class."""
        if kind in ("Exchange", "Call"):
            self.calls += number
        elif kind != "AppReport":
            self.others += number

    @property
    def is_zero(self) -> bool:
        """Whether both numbers are zero."""
        return not (self.calls or self.others)

    def __str__(self) -> str:
        """Return the numbers in words; empty if both are zero."""
        calls = f"{self.calls} call{'s' * (self.calls != 1)}" if self.calls else ""
        others = f"{self.others} other record{'s' * (self.others != 1)}" if self.others else ""
        return " and ".join(part for part in (calls, others) if part)


@dataclass(slots=True)
class Counts:
    """How many of the app's calls were written to the store."""

    recorded: int = 0
    served_by_policy: int = 0
    fallbacks: int = 0
    engine_full: int = 0

    def add(self, written: Sequence[Record]) -> None:
        """Count the calls among records that were written. Copies of calls are not counted."""
        for call in written:
            if type(call).__name__ == "Call" and (call := cast("Call", call)).shadow_of is None:
                self.recorded += 1
                self.served_by_policy += call.policy is not UPSTREAM
                self.fallbacks += call.fallback is not None
                self.engine_full += (call.fallback or "").endswith(ENGINE_FULL)


class Account:
    """What waits in a recorder, and what was lost. The app's threads and the recorder's use it."""

    def __init__(self, most_bytes: int) -> None:
        # Re-entrant, as is all that a finaliser may get to; see `Recorder`.
        self._lock = RLock()
        self._most_bytes = most_bytes
        self.bytes = 0  # of memory that items hold
        self._kept_bytes = 0  # of these, what the spool has as well
        self.unfinished = 0  # items that are neither written nor dropped
        self.dropped = 0  # records that were lost
        self._unsafe, self._safe = Tally(), Tally()  # what is in memory alone, and what the spool has
        self._lost: dict[str, Tally] = {}
        self._said = ""

    @property
    def all_safe(self) -> bool:
        """Whether the spool has all that waits."""
        return self._unsafe.is_zero

    @property
    def is_crowded(self) -> bool:
        """Whether a quarter of the memory is in use."""
        return self.bytes > self._most_bytes // 4

    def admit(self, kind: str, size: int, trouble: str | None) -> bool:
        """Count a new item, or count it as lost and return false if there is no room for it."""
        with self._lock:
            # The newest call is dropped, not the oldest: that costs the caller nothing, while making room would free
            # other calls' bytes in its time. Trajectories that began before the trouble stay whole.
            if self.bytes + size > self._most_bytes:
                self.lose(kind, full_because(trouble))
                return False
            self.bytes += size
            self.unfinished += 1
            self._unsafe.add(kind)
            return True

    def spooled(self, item: Item) -> None:
        """Note that the spool has an item; it leaves memory if enough others are kept there."""
        with self._lock:
            self._unsafe.add(item.kind, -1)
            self._safe.add(item.kind)
            if self._kept_bytes + item.size > KEPT_BYTES:
                self.bytes -= item.size
                item.content, item.records, item.size = None, None, 0
            self._kept_bytes += item.size

    def finish(self, items: Sequence[Item], dropped: str | None = None) -> None:
        """Free the memory of items that were written, or dropped for a cause."""
        with self._lock:
            for item in items:
                self.bytes -= item.size
                self.unfinished -= 1
                (self._unsafe if item.place is None else self._safe).add(item.kind, -1)
                self._kept_bytes -= 0 if item.place is None else item.size
                if dropped is not None:
                    self.lose(item.kind, dropped)

    def lose(self, kind: str, cause: str) -> None:
        """Count a record as lost; `kind` is the name of its class."""
        with self._lock:
            self.dropped += 1
            self._lost.setdefault(cause, Tally()).add(kind)

    def losses(self) -> str:
        """Return how many records were lost and why, in sentences without the final full stop; empty if none was."""
        return _sentences(dict(self._lost))

    def say(self, trouble: str | None) -> None:
        """Write one line to stderr about what was lost or is not safe, unless it was written before. Never raises."""
        line = _sentences({**self._lost, SLOW if trouble is None else unwritable(trouble): self._unsafe})
        if trouble is not None and not self._safe.is_zero:
            line += f"{'. ' * bool(line)}{self._safe} kept beside the store, because {unwritable(trouble)}"
        if line and line != self._said:
            self._said = line
            # It runs while the interpreter exits: stderr may be closed, `None` (under pythonw), or an app's object.
            with suppress(Exception):
                print(f"art_patch: {line}", file=sys.stderr, flush=True)


def _sentences(losses: dict[str, Tally]) -> str:
    return ". ".join(f"{lost} not recorded, because {cause}" for cause, tally in losses.items() if (lost := str(tally)))
