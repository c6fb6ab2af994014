"""`replayable()`: marks a function that the job may call again, so that a run without siblings gets some.

In: the app's calls of the function. Out: each call is a run of the agent, whose metadata says how to repeat it::

    {"replay": {"target": "module:function", "args": [...], "kwargs": {...}}}

The target is a name that another process can import: a module, or the absolute path of the script that was started.
The arguments are noted when the call starts, and only if a round trip through JSON leaves them equal. A repetition is
not itself offered for repetition. No call of the function ever fails because of this module.
"""

import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from art_patch._lib.faults import faults
from art_patch.context.ambient import surroundings
from art_patch.context.scopes import carry, noted_run
from art_patch.errors import ConfigError
from art_patch.recording import redacts
from art_patch.types import JSON, REPLAY

P = ParamSpec("P")
R = TypeVar("R")

# Longer arguments are not noted: every reader of the run would have to carry them.
MOST_BYTES = 64 << 10

_encode = json.JSONEncoder(allow_nan=False).iterencode

_offered: dict[tuple[str, str], Callable[..., Any]] = {}
_noting = [True]


def replayable(function: Callable[P, R]) -> Callable[P, R]:
    """Offer `function` to the job: `art-patch retrain --replay 3` may call it again with the same arguments.

    The job repeats runs that have no siblings. At each gate it also repeats held-out runs, both with the candidate and
    with the champion.

    Offer only a function that may safely run twice: its tools only read, or write into a sandbox. Each call of the
    function is one run of the agent. Inside a `trajectory()` in which no model was called so far, the call is that
    trajectory's run. Arguments must be JSON values of 64 KiB at most; a run with other arguments is recorded but not
    repeated.

    The job imports the module only after it has found in the source that this decorator stands above the function, or
    that the top level calls `replayable(function)`. Code behind `if __name__ == "__main__":`, such as
    `patch(redact=...)`, does not run in that import; put everything that a run needs above it.

    ::

        @art.replayable
        def answer(question: str) -> str: ...

    Args:
        function: a plain or async function, at the top level of a module or of a script that is started as a file.

    Raises:
        ConfigError: if another process could not import the function, or if the function is a generator.
    """
    target, name = _target(function), function.__name__
    run = carry(function, lambda args, kwargs: _scope(name, target, args, kwargs))
    # Looked up by name: the module's attribute may be wrapped in other decorators by then.
    _offered[function.__module__, function.__qualname__] = run
    return run


def offered(module: str, name: str) -> Callable[..., Any] | None:
    """Return the function of this name that the module has marked with `replayable()`; `None` if there is none."""
    return _offered.get((module, name))


def note_no_more() -> None:
    """Stop noting how to repeat runs, in a process that itself repeats runs for the job."""
    _noting[0] = False


def _scope(
    name: str, target: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> AbstractContextManager[object, None]:
    """Return the scope of a call: the run around it if that has no call yet, or a new run."""
    try:
        opened = surroundings().open
        noted = _noted(target, args, kwargs) if _noting[0] else {}
        if opened is None:
            return noted_run(name, noted)
        # A run that has begun cannot be repeated from here on, and a run of two calls not by one of them.
        if not opened.used and REPLAY not in opened.info.metadata:
            opened.info = replace(opened.info, metadata={**opened.info.metadata, **noted})
    except Exception as error:
        faults.fault("context.replayable", error)
    return nullcontext()


def _noted(target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> JSON:
    """Return the metadata that repeats a call; empty if the call cannot be repeated."""
    given = [list(args), dict(kwargs)]
    parts: list[str] = []
    size = 0
    try:
        for part in _encode(given):  # in parts, so that a long list costs no more than the limit
            parts.append(part)
            size += len(part)
            if size > MOST_BYTES:
                return {}
        copy = json.loads("".join(parts))
        if copy != given:  # for example a tuple, which comes back as a list
            return {}
    except Exception:  # the app's objects may raise anything when they are read
        return {}
    offer = {"target": target, "args": copy[0], "kwargs": copy[1]}
    return {REPLAY: {**offer, "redacted": True} if redacts() else offer}


def _target(function: Any) -> str:
    """Return `module:name`, or `/path/of/script.py:name`."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not callable(function) or inspect.isclass(function) or not (isinstance(module, str) and isinstance(name, str)):
        raise ConfigError(f"replayable() takes a function, not {function!r}; put @replayable above a `def`")
    if "." in name or name == "<lambda>":
        kind = "defined inside a function" if "<locals>" in name else "a lambda" if name == "<lambda>" else "a method"
        raise ConfigError(
            f"{name} is {kind}, which another process cannot import; "
            "offer a function at the top level of a module, and make in it what it needs"
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"{name} yields, and a run is repeated by one call; offer a function that returns the answer")
    return f"{_importable(module, name)}:{name}"


def _importable(module: str, name: str) -> str:
    if module not in ("__main__", "__mp_main__"):  # `__mp_main__` is the script in a child of multiprocessing
        return module
    main = sys.modules.get(module)
    spec: Any = getattr(main, "__spec__", None)
    if spec is not None and spec.name not in ("__main__", "__mp_main__"):
        return spec.name  # python -m package.agent
    file: Any = getattr(main, "__file__", None)
    if not isinstance(file, str):
        raise ConfigError(
            f"{name} was typed into an interpreter or a notebook, where no other process finds it; "
            "move it into a file and import it from there"
        )
    return os.path.abspath(file)
