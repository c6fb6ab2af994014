"""Which integrations are installed: the entry points of the group `art_patch.integrations`, without their modules.

`importlib.metadata` would find them alone, but it opens every installed package's file through `pathlib`: twice the
time, of which `patch()` has little. So directories are read here, and it is asked about all else: zip files, eggs, and
whatever another finder knows.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, EntryPoint, distributions

GROUP = "art_patch.integrations"
"""Entry-point group of the modules that teach other frameworks to carry our context."""


def integrations() -> Iterator[EntryPoint]:
    """Yield what is installed."""
    for package in _packages():
        yield from package.entry_points.select(group=GROUP)


def _packages() -> Iterator[Distribution]:
    """Yield the packages that may have some."""
    if any(finder is not PathFinder and hasattr(finder, "find_distributions") for finder in sys.meta_path):
        yield from distributions()
        return
    for path in map(str, sys.path):  # people put `Path`s there
        try:
            names = os.listdir(path or ".")
        except OSError:
            names = None
        if names is None or path.endswith(".egg"):
            yield from distributions(path=[path])
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
                place = os.path.join(path, name)
                with suppress(OSError), open(f"{place}/entry_points.txt", "rb", buffering=0) as file:
                    if GROUP.encode() in file.read():
                        yield Distribution.at(place)
