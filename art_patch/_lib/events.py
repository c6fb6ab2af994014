"""Writes what an operator of a server or job wants to read into its log: one line for each event.

Only a command that runs a server or a job switches it on. So an app that logs everything at INFO, and a script that
uses art_patch as a library, get no line from here.
"""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

_WRITES = [False]


@contextmanager
def written() -> Generator[None]:
    """Let `event` write while the block runs."""
    _WRITES[0] = True
    try:
        yield
    finally:
        _WRITES[0] = False


def event(part: str, words: str, *values: object, level: int = logging.INFO, **facts: Any) -> None:
    """Log an event of a part of art_patch, such as `serve`; `facts` become fields of its line in JSON.

    Neither words nor facts may hold a key or a text of the app's users.
    """
    if _WRITES[0]:
        logging.getLogger(f"art_patch.{part}").log(level, words, *values, extra={"facts": facts})


_OF_ROUTE = ("mode", "champion", "learner", "challenger", "challenger_percent", "control_percent", "base_url")


def route_turned(before: object, now: object) -> None:
    """Log in which of their fields two routes differ, or two targets; nothing if in none."""
    if _WRITES[0]:
        pairs = {name: (getattr(before, name, None), getattr(now, name, None)) for name in _OF_ROUTE}
        changed = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        words = ", ".join(f"{name} {was or 'none'} -> {its or 'none'}" for name, (was, its) in changed.items())
        if changed:
            facts: dict[str, Any] = {name: its for name, (_, its) in changed.items()}
            event("route", "the route changed: %s", words, event="route", **facts)
