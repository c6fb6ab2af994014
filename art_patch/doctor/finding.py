"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "bad"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, and how it is.

    Attributes:
        name: what was looked at; several findings may share it.
        level: `ok`; `warn`: works, but know this; `bad`: something will not work.
        text: how it is.
        cure: what to do, where there is something to do.
    """

    name: str
    level: Level
    text: str
    cure: str = ""
