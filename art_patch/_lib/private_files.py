"""Files that hold what was recorded, what a judge said, or what our programs say of both: for their owner alone.

Their directory is private, too, unless somebody made it before us or opened it up.
"""

from __future__ import annotations

import os


def private(path: str, flags: int) -> int:
    """Opener for `open()`: a file that it makes can be read by its owner alone; one that is there keeps its mode."""
    return os.open(path, flags, 0o600)
