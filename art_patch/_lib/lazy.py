"""Imports a folder's modules on demand: its `__init__` lists public names, and the first use of one imports its module.

So `art_patch.patch()` does not load SQLAlchemy, and `art-patch --help` does not load torch.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for the `__init__` of the folder with the dotted name `package`.

    `modules` maps a module's name, relative to the package, to its public names, separated by spaces.
    """
    home = {name: module for module, names in modules.items() for name in names.split()}

    def __getattr__(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{home[name]}"), name)
        setattr(sys.modules[package], name, value)  # so that Python finds the name by itself next time
        return value

    return __getattr__
