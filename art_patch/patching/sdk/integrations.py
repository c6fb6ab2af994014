"""Calls each installed integration (entry point `art_patch.integrations`) when its framework's module is imported."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any, Literal

import wrapt

from art_patch._lib.faults import faults
from art_patch.errors import ConfigError

GROUP = "art_patch.integrations"


class Integrations:
    """The installed integrations, and those of them that are set to run when their framework is imported."""

    def __init__(self, on_armed: Callable[[str], None], on_broken: Callable[[str, str], None]) -> None:
        """Call `on_armed(name)` for each integration that works, else `on_broken(name, class of the error)`."""
        self._on_armed = on_armed
        self._on_broken = on_broken
        # `None` until the first `patch()`: looking through all installed packages takes milliseconds.
        self._installed: dict[str, EntryPoint] | None = None
        self._waiting: set[str] = set()

    def wanted(self, asked: Literal["auto", "off"] | Sequence[str]) -> list[EntryPoint]:
        """Return the integrations that the settings name and that `arm_when_imported` was not called with yet."""
        if asked == "off":
            return []
        if self._installed is None:
            self._installed = {entry.name: entry for entry in find_integrations()}
        installed = self._installed
        missing = [name for name in asked if name not in installed] if asked != "auto" else []
        if missing:
            known = ", ".join(sorted(installed)) or "none"
            raise ConfigError(
                f"integrations: none is installed for {', '.join(missing)}; installed are: {known}. Install "
                "the package that brings it, or leave `integrations` (ART_PATCH_INTEGRATIONS) unset"
            )
        return [installed[name] for name in (installed if asked == "auto" else asked) if name not in self._waiting]

    def arm_when_imported(self, entries: Iterable[EntryPoint]) -> None:
        """Call each integration when its framework is imported, or at once if the framework is imported already."""
        for entry in entries:
            self._waiting.add(entry.name)
            wrapt.register_post_import_hook(partial(self._arm, entry), entry.name)

    def _arm(self, entry: EntryPoint, module: Any) -> None:
        try:
            # Not `wrapt.discover_post_import_hooks`: it loads all at once, and a broken one breaks the app's import.
            entry.load()(module)
            self._on_armed(entry.name)
        except Exception as error:
            faults.trouble("integrations", error)
            self._on_broken(entry.name, type(error).__name__)


def find_integrations() -> Iterator[EntryPoint]:
    """Yield the entry points of all installed integrations, without importing them."""
    for package in _packages():
        yield from package.entry_points.select(group=GROUP)


def _packages() -> Iterator[Distribution]:
    # `importlib.metadata` opens the file of every package through `pathlib`, which takes twice the time, and `patch()`
    # waits for it. So plain directories are read here; zip files, eggs and other finders are left to it.
    if any(finder is not PathFinder and hasattr(finder, "find_distributions") for finder in sys.meta_path):
        yield from distributions()
        return
    for path in map(str, sys.path):  # some apps put a `Path` there
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
