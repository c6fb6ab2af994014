"""The record of one check of `art-patch doctor`, which is shown as one line of its report."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "bad", "unknown"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str  # the thing that was checked; several findings may have one name
    # `ok`: nothing to correct; `warn`: it works, with a risk or a loss; `bad`: something does not work; `unknown`: it
    # cannot be looked at, because of what another finding tells.
    level: Level
    text: str
    cure: str = ""  # a command or an instruction that corrects the state; empty if there is nothing to correct
