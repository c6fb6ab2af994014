"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "bad"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        name: the thing that was checked; several findings may have one name.
        level: `warn`: it works, with a risk or a loss. `bad`: something does not work.
        text: the state that was found, in words.
        cure: a command or an instruction that mends it; empty if there is nothing to mend.
    """

    name: str
    level: Level
    text: str
    cure: str = ""
