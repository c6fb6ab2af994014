"""Python imports this at its start, because `art-patch run` put its directory on `PYTHONPATH`. Standard library only.

Right before the program imports the SDK, or a library in `_OURS`, this module patches the process, as
`art_patch.patch()` does. If that fails, it writes one line to stderr, and the program goes on without the patch.
"""

from __future__ import annotations

import atexit
import sys
from importlib.machinery import ModuleSpec, PathFinder

TYPE_CHECKING = False  # `typing` is not imported for it: every Python process pays for what is imported here
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

# The SDK, and libraries that import it in the middle of a module that an integration needs complete.
# And SDKs of other providers, whose calls are counted.
_OURS = frozenset({"openai", "litellm", "dspy", "ag2", "instructor", "anthropic", "google.genai"})
# HTTP libraries, which tell of calls past all of these: `art_patch.autostart`.
_HTTP = frozenset({"httpx", "httpx2", "requests.models", "aiohttp.client_reqrep"})
# Attribute of `sys` with the files that ran already, so that two launchers that call each other come to an end.
_SEEN = "_art_patch_sitecustomize"


class _Starter:
    """A finder that finds no module itself. Python asks it for each one, which shows when one of ours comes."""

    def __init__(self) -> None:
        self._once = [_start]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in _HTTP:
            return _watched(name, path)
        if name not in _OURS or not self._once:
            return None
        before = list(sys.meta_path)
        try:
            start = self._once.pop()
        except IndexError:  # another thread was first
            return None
        start()
        for finder in list(sys.meta_path):
            if finder is self:
                return None
            if finder not in before and (spec := finder.find_spec(name, path, target)) is not None:
                # `patch()` has put a finder before this one, which hands a module to its integration. Python is past it
                # in the list that it is walking through, so it is asked here.
                return spec
        return None


def _watched(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Return the module's own spec, with a loader that also wraps what the module sends by."""
    spec = PathFinder.find_spec(name, path)
    loader = None if spec is None else spec.loader
    if loader is None:
        return None
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        try:
            from art_patch.autostart import watch

            watch(module)
        except Exception:
            return  # an unknown release, or an environment without art_patch: nothing is told

    loader.exec_module = exec_module
    return spec


def _start() -> None:
    try:
        from art_patch.patching import patch_around

        patch_around()
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if sys.stderr is not None:  # pyright: ignore[reportUnnecessaryComparison] - there is none under pythonw
            sys.stderr.write(f"art-patch: {said}; this process ({sys.executable}) is not patched\n")


def _at_exit() -> None:
    # First of all handlers to be registered, so it runs last.
    try:
        if (calls := sys.modules.get("art_patch.autostart")) is not None:
            calls.tell()
    except Exception:
        return  # stderr may be closed


def _hand_on(seen: set[str]) -> None:
    """Run the `sitecustomize` that Python would have found without this one."""
    for directory in sys.path:
        spec = PathFinder.find_spec("sitecustomize", [directory])
        if spec is None or spec.loader is None or spec.origin is None or spec.origin in seen:
            continue
        from importlib.util import module_from_spec  # not before it is needed: every Python process pays for it

        seen.add(spec.origin)
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return


_seen = sys.__dict__.setdefault(_SEEN, set())
if __file__ not in _seen:
    _seen.add(__file__)
    sys.meta_path.insert(0, _Starter())
    atexit.register(_at_exit)
_hand_on(_seen)
