"""No garbage collection while `patch()` is at work.

Python looks at every object that there is once enough new ones have come. `patch()` makes a few thousand, mostly
functions and classes that stay; `import openai` before it has left a hundred thousand and more, and to look at those
takes longer than all that `patch()` does. So it is put off until the app itself makes objects, as it would be without
us. At the end the new ones alone are looked at, which takes little time; as many as they are, the next object would
cause the look that was put off. Standard library only.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from contextlib import contextmanager

_paused: list[None] = []
"""One for each thread that has switched it off."""


@contextmanager
def uncollected() -> Generator[None]:
    """Collect nothing in here; change nothing if it is switched off already, by the app or by ourselves."""
    if not gc.isenabled():
        yield
        return
    _paused.append(None)
    try:
        gc.disable()
        yield
    finally:
        gc.collect(0)
        gc.enable()
        _paused.pop()


def _after_fork() -> None:
    if _paused:  # in another thread, which does not exist here and cannot switch it on again
        _paused.clear()
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
