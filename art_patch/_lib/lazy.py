"""A folder's public face: its `__init__` names what it hands out, and a module is imported when a name is first used.

So that importing a folder costs nothing: `art_patch.patch()` must not load SQLAlchemy, `art-patch --help` no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's `__getattr__`.

    Args:
        package: the folder's dotted name.
        modules: module, relative to the package -> the names that it hands out, with spaces between.
    """
    home = {name: module for module, names in modules.items() for name in names.split()}

    def __getattr__(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{home[name]}"), name)
        setattr(sys.modules[package], name, value)  # Python asks here only for what is not there
        return value

    return __getattr__
