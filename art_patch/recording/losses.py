"""What a process could not record: counted by cause, and said in one line on stderr when the process ends.

Calls are counted, and apart from them scores, ends of trajectories and the like. What the recorder reports of itself is
no loss. Nothing here raises, imports or waits: `say` runs while the interpreter goes down, where stderr may be closed.
"""

from __future__ import annotations

import sys
from contextlib import suppress

QUEUE_FULL = "the queue was full; raise queue_mib (ART_PATCH_QUEUE_MIB)"
REDACTION = "redaction failed; mend the function that `redact` names"
FAULT = "of a fault in art_patch; the logger art_patch shows it at level DEBUG, please report it"
REFUSED = "the store refuses them; the logger art_patch shows why at level DEBUG"
SLOW = "the store had not taken it all when the exit stopped waiting; call art_patch.flush(60) before the program ends"


def unwritable(trouble: str) -> str:
    """Return the cause where the store answers with an error of that class."""
    return f"the store cannot be written ({trouble}); `art-patch doctor` says why"


class Tally:
    """How many calls, and how many other records."""

    __slots__ = ("calls", "others")

    def __init__(self) -> None:
        """Start with none."""
        self.calls = 0
        self.others = 0

    def add(self, item: object, number: int = 1) -> None:
        """Count an item of the queue, or the record that became of it."""
        kind = type(item).__name__  # the classes of records are imported by the writer's thread alone
        if kind in ("Exchange", "Call"):
            self.calls += number
        elif kind != "AppReport":
            self.others += number

    def __str__(self) -> str:
        """Return the number in words; empty if there is nothing."""
        calls = f"{self.calls} call{'s' * (self.calls != 1)}" if self.calls else ""
        others = f"{self.others} other record{'s' * (self.others != 1)}" if self.others else ""
        return " and ".join(part for part in (calls, others) if part)


def sentence(losses: dict[str, Tally]) -> str:
    """Return what was lost, without a full stop at its end; empty if nothing was.

    Args:
        losses: by their cause, one of the sentences above.
    """
    parts = [f"{lost} not recorded, because {cause}" for cause, tally in losses.items() if (lost := str(tally))]
    return ". ".join(parts)


def say(line: str) -> None:
    """Write a line on stderr, if there is one."""
    with suppress(Exception):  # closed, or none under pythonw, or the app's own object
        print(line, file=sys.stderr, flush=True)
