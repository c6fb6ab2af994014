"""A folder's public names: its `__init__` lists them, and a module is imported when one of its names is first used.

So importing a folder costs nothing: `art_patch.patch()` must not load SQLAlchemy, `art-patch --help` no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a folder's `__init__`, which imports the module of a name on demand.

    Args:
        package: the folder's dotted name.
        modules: module, relative to the package -> its public names, separated by spaces.
    """
    home = {name: module for module, names in modules.items() for name in names.split()}

    def __getattr__(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{home[name]}"), name)
        setattr(sys.modules[package], name, value)  # so that Python finds the name by itself next time
        return value

    return __getattr__
