"""Imports a folder's modules on demand: its `__init__` lists public names, and the first use of one imports its module.

So `art_patch.patch()` does not load SQLAlchemy, and `art-patch --help` does not load torch. Standard library only.

Garbage collection pauses meanwhile. Python's collector visits every object after enough new ones were created. With the
pause, the collector runs later, when the app creates objects, as it would without art_patch.
"""

import gc
import os
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import CodeType
from typing import TYPE_CHECKING as TYPE_CHECKING
from typing import Any

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


def lazily() -> Callable[[str], Any]:
    """Return a `__getattr__` for the module that calls this, mostly a folder's `__init__`.

    Its names and their modules are those of the module's own import statements. These stand under
    `if TYPE_CHECKING:`, where type checkers and editors read them, and Python compiles but never executes them.
    """
    caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage] - `inspect` would cost the app milliseconds
    package, code = caller.f_globals["__name__"], caller.f_code
    home: dict[str, str] = {}

    def __getattr__(name: str) -> Any:
        if not home:
            home.update(_imports(code))
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with uncollected():
            # `from package import module`: the package itself has no such name yet.
            module = import_module(f"{package}.{name}" if home[name] == package else home[name])
            value = module if home[name] == package else getattr(module, name)
        setattr(sys.modules[package], name, value)  # so that Python finds the name by itself next time
        return value

    return __getattr__


def _imports(code: CodeType) -> Iterator[tuple[str, str]]:
    """Yield (name, module) for each `from module import name` that the code holds, whether it is executed or not."""
    import dis

    module = ""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            module = instruction.argval
        elif instruction.opname == "IMPORT_FROM":
            yield instruction.argval, module
