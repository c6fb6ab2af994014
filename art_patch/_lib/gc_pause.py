"""No garbage collection while `patch()` is at work. Standard library only.

Python looks at every object once enough new ones have been made. `patch()` makes a few thousand, and `import openai`
before it left a hundred thousand and more; looking at those takes longer than the whole of `patch()`. So the collection
is put off until the app itself makes objects, as it would be without us.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from contextlib import contextmanager

# One entry for each thread that has switched collection off.
_paused: list[None] = []


@contextmanager
def uncollected() -> Generator[None]:
    """Collect no garbage in the block; do nothing if the app, or another thread of ours, has switched it off."""
    if not gc.isenabled():
        yield
        return
    _paused.append(None)
    try:
        gc.disable()
        yield
    finally:
        # The new objects alone, which is quick. Without this, the app's next object would trigger the full collection.
        gc.collect(0)
        gc.enable()
        _paused.pop()


def _after_fork() -> None:
    # Another thread had switched collection off; it does not exist in the child and cannot switch it on again.
    if _paused:
        _paused.clear()
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
