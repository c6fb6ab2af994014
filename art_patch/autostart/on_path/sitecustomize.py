"""Python runs this at its start because `art-patch run` put this directory on `PYTHONPATH`. Standard library only.

It waits for the import of a library that we look after, and calls `art_patch.patch()` right before it. Whatever goes
wrong in here is one line on stderr; the program goes on.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_OURS = frozenset({"openai", "litellm", "dspy"})
_SEEN = "_art_patch_sitecustomize"
"""Attribute of `sys`: the files that ran already, so that two launchers that hand on to each other come to an end."""


class _Starter:
    """Finds no module; it is asked for each one, which tells it when one of ours comes.

    It stays in `sys.meta_path` afterwards: Python is walking through that list at this very moment.
    """

    def __init__(self):
        self._once = [_start]

    def find_spec(self, name, path=None, target=None):
        if name in _OURS and self._once:
            try:
                start = self._once.pop()
            except IndexError:  # another thread was first
                return None
            start()
        return None


def _start():
    try:
        import art_patch

        art_patch.patch()
    except Exception as error:
        message = " ".join(str(error).split())
        _say(f"{type(error).__name__}: {message}; this process ({sys.executable}) is not patched")


def _say(message):
    if sys.stderr is not None:
        sys.stderr.write(f"art-patch: {message}\n")


def _hand_on(seen):
    """Run the `sitecustomize` that Python would have found without us."""
    for directory in sys.path:
        spec = PathFinder.find_spec("sitecustomize", [directory])
        if spec is None or spec.loader is None or spec.origin is None or spec.origin in seen:
            continue
        seen.add(spec.origin)
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)
        return


def _begin():
    seen = sys.__dict__.setdefault(_SEEN, set())
    if __file__ not in seen:
        seen.add(__file__)
        sys.meta_path.insert(0, _Starter())
    _hand_on(seen)


_begin()
