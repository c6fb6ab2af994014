"""Signs that a store which is being opened gets on, for whoever waits for it with a deadline. Standard library only.

Opening imports hundreds of modules, then makes or migrates tables: seconds on a busy machine. `steps` grows with each
of them. It counts for the whole process.
"""

from __future__ import annotations

import sys

_steps: list[None] = []


def got_on() -> None:
    """Count a step."""
    _steps.append(None)


def steps(*, imports: bool) -> int:
    """Return how far this process has come: steps and, if they count, modules that were imported by whatever thread."""
    return len(_steps) + (len(sys.modules) if imports else 0)
