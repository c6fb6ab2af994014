"""The record of one check of `art-patch doctor`, which is shown as one line of its report."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "bad"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str  # the thing that was checked; several findings may have one name
    level: Level  # `ok`: nothing to correct; `warn`: it works, with a risk or a loss; `bad`: something does not work
    text: str
    cure: str = ""  # a command or an instruction that corrects the state; empty if there is nothing to correct
