"""Pauses Python's garbage collection while `patch()` runs. Standard library only.

Python's collector visits every object after enough new ones were created. `patch()` creates a few thousand objects, and
the `import openai` before it a hundred thousand or more; to visit those takes longer than `patch()` itself. With the
pause, the collector runs later, when the app creates objects, as it would without art_patch.
"""

import gc
import os
from collections.abc import Generator
from contextlib import contextmanager

# One entry for each thread that has switched collection off.
_paused: list[None] = []


@contextmanager
def uncollected() -> Generator[None]:
    """Switch garbage collection off in the block, unless the app or another thread has done so already."""
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
