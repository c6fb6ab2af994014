"""`python -m art_patch.replay_runner TARGET [redacted]`: an app process that repeats runs of one `replayable` function.

In: one line of JSON for each run, on standard input. Out: one line each, on standard output, after a first one that
says whether the function is there. The app's own input and output are `/dev/null`. Calls go to the champion (mode
`route`) and are recorded as any app's; settings come from the environment.

Only functions that were offered are called, and no script from outside the working directory is loaded: the targets
come from the store, and whoever may write to it should not be able to run anything else.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from contextvars import copy_context
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, TextIO

import art_patch
from art_patch.context.replaying import note_no_more, offered
from art_patch.errors import ArtPatchError, ConfigError, EngineError
from art_patch.recording.outlet import redacts

_MODULE = "__replayed_main__"
"""Name under which a script is loaded, so that what it guards by `__name__ == "__main__"` does not run."""

_READY_S = 10.0
_FLUSH_S = 30.0


def main(target: str, *, redacted: bool) -> None:
    """Load the function, and repeat runs until standard input ends; none if they have to be `redacted` and are not."""
    questions, answers = _own_pipes()

    def say(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    given = {name: os.environ.get(f"ART_PATCH_{name.upper()}") for name in ("project", "home", "store")}
    note_no_more()
    try:
        function = load(target)
        _patch(given)
        if redacted and not redacts():
            raise ConfigError(
                "what the app records is redacted, and here nothing would be; put art_patch.patch(redact=...) at the "
                "top level of its module, or set ART_PATCH_REDACT for the job, too"
            )
        _wait_for_champion()
    except BaseException as error:  # a module may do anything while it is imported, `sys.exit()` included
        said = str(error) if isinstance(error, ArtPatchError) else f"{type(error).__name__}: {error}"
        say({"error": said[:300]})
        return
    say({"ready": True})
    with asyncio.Runner() as loop:  # one for all runs, because clients keep connections that belong to theirs
        for line in questions:
            _patch(given)  # the run before may have undone it
            say(_repeat(function, json.loads(line), loop))


def load(target: str) -> Callable[..., Any]:
    """Import the module, or load the script, and return the function that it offers.

    Raises:
        ConfigError: if there is no such function, or the script lies elsewhere.
        BaseException: whatever the module raises.
    """
    module, _, name = target.rpartition(":")
    if os.path.isabs(module):
        module = _load_script(Path(module))
    else:
        sys.argv[:] = [module]
        import_module(module)
    function = offered(module, name)
    if function is None:
        raise ConfigError(f"{target} is not offered; put @art_patch.replayable above it")
    return function


def _load_script(path: Path) -> str:
    here = Path.cwd().resolve()
    if not path.resolve().is_relative_to(here):
        raise ConfigError(f"the script lies outside of {here}; start `art-patch retrain` in the directory of the app")
    sys.argv[:] = [str(path)]
    sys.path.insert(0, str(path.parent))
    spec = spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError("there is no such script any more")
    sys.modules[_MODULE] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return _MODULE


def _own_pipes() -> tuple[TextIO, TextIO]:
    """Keep standard input and output for ourselves: what the app prints is no answer of ours."""
    questions = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    return questions, answers


def _patch(given: Mapping[str, Any]) -> None:
    """Patch as the job wants it, whatever the app has said: routed, and every run recorded."""
    art_patch.patch(mode="route", sample_rate=1.0, **given)


def _wait_for_champion() -> None:
    until = time.monotonic() + _READY_S
    while (now := art_patch.status()).champion is None or now.base_url is None:
        if time.monotonic() > until:
            raise EngineError("no policy serves here; start `art-patch serve`")
        time.sleep(0.05)


def _repeat(function: Callable[..., Any], question: Mapping[str, Any], loop: asyncio.Runner) -> dict[str, Any]:
    key, raised = question["group"], None
    try:
        with art_patch.group(key) if key else nullcontext(), art_patch.trajectory(**question["trajectory"]):
            result = function(*question["args"], **question["kwargs"])
            if inspect.isawaitable(result):
                loop.run(_result_of(result), context=copy_context())  # else it would have the first run's
    except BaseException as error:  # `sys.exit()`, too, is how a run ends
        raised = type(error).__name__
    return {"raised": raised, "written": art_patch.flush(_FLUSH_S)}


async def _result_of(work: Awaitable[Any]) -> Any:
    return await work


if __name__ == "__main__":
    main(sys.argv[1], redacted=sys.argv[2:] == ["redacted"])
