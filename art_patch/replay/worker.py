"""`python -m art_patch.replay.worker TARGET [redacted]`: loads the app's code and repeats runs of one function.

The process reads one line of JSON for each run from standard input. To standard output it first writes a line that says
whether the function was found, then one line for each run. The runs' calls go to the champion (mode `route`) and are
recorded like any app's calls. If a run is to begin at a turn, the calls before it get the answers that were recorded.

Security: the name of the function comes from the store, and write access to the store must not become the right to run
any code. So a module or script is executed only if its source marks the function as `replayable`, and a script only if
it lies inside the working directory. Only marked functions are called.

Recorded answers. The function runs from its start, so its variables and tools are in the state that they had at the
turn where a policy goes on. Its calls are recognised by their prompts, in any order, as parallel calls come. A call
whose prompt the recorded run did not have, before it went on from the turn, shows that the run took another way, for
example because a tool found something else; the run is stopped there. Calls that belong to another run, such as one
that the function opens in itself or a task that an earlier run has left behind, are none of this run's, neither here
nor in what was recorded; a policy answers them. Calls that get a recorded answer are not recorded again.
"""

import ast
import asyncio
import inspect
import json
import os
import sys
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from datetime import timedelta
from functools import partial
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from threading import Lock
from typing import Any, TextIO

import wrapt

from art_patch.context import group, note_no_more, offered, trajectory
from art_patch.errors import ArtPatchError, ConfigError, EngineError
from art_patch.patching import flush, patch_around, pending_call, status
from art_patch.recording import redacts
from art_patch.trajectories import prompt_key
from art_patch.types import JSON


class OtherWay(BaseException):
    """Stops a run whose calls are not those that were recorded. No `except Exception` of the app catches it."""


class RecordedAnswers:
    """The answers of one run that are given again, each once."""

    def __init__(self, given: JSON | None, run: str | None = None) -> None:
        """Take what `processes.question_of` made, for the run of this id; with `None`, a policy answers every call."""
        self.run = run
        self._turn = None if given is None else given["turn"]
        # A parallel call may come before the turn that came after it when it was recorded, because what was recorded is
        # answered at once. So any of these prompts shows that the run came as far as it is to be led.
        self._open = frozenset[str](() if given is None else (given["turn"], *given["later"]))
        self._left: dict[str, deque[list[JSON]]] = defaultdict(deque)
        for key, choices in () if given is None else given["answers"]:
            self._left[key].append(choices)
        self._lock = Lock()  # the app may make calls in several threads
        self._led = given is not None  # whether no policy has been asked yet
        self.reached = given is None  # whether a policy has been asked for the turn
        self.strayed = False  # whether the run took another way before that

    def to(self, body: bytes) -> bytes | None:
        """Return the recorded answer to a chat completion's request; `None` if a policy is to answer it.

        A request that only the provider can answer is an empty object; before the turn, it stops the run, too.
        """
        asked = json.loads(body)
        key = prompt_key(asked.get("messages") or (), asked.get("tools") or ())
        with self._lock:
            if self._left.get(key):
                return (_events if asked.get("stream") else _whole)(asked, self._left[key].popleft())
            self._led = self._led and key not in self._open
            self.reached = self.reached or key == self._turn
            self.strayed = self.strayed or self._led
        if self.strayed:
            raise OtherWay
        return None


class Intercepted:
    """Stands below the SDK: requests of art_patch's calls get the answers of `answers`, all others pass."""

    def __init__(self) -> None:
        """Wrap the HTTP libraries that an SDK may use, for the life of this process."""
        self.answers = RecordedAnswers(None)
        for name in ("httpx", "httpx2"):
            try:
                library = import_module(name)
            except ImportError:
                continue
            wrapt.wrap_function_wrapper(library, "Client.send", self._sync(library))
            wrapt.wrap_function_wrapper(library, "AsyncClient.send", self._async(library))

    def _sync(self, library: Any) -> Callable[..., Any]:
        def send(wrapped: Callable[..., Any], client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            answer = self._answer(library, args[0] if args else kwargs["request"])
            return wrapped(*args, **kwargs) if answer is None else answer

        return send

    def _async(self, library: Any) -> Callable[..., Awaitable[Any]]:
        async def send(wrapped: Callable[..., Any], client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            answer = self._answer(library, args[0] if args else kwargs["request"])
            return await wrapped(*args, **kwargs) if answer is None else answer

        return send

    def _answer(self, library: Any, request: Any) -> Any:
        """Return the response to a request of a call that art_patch records; `None` to send it."""
        answers = self.answers
        if (call := pending_call()) is None:
            return None
        exchange = call.exchange
        if (None if exchange.trajectory is None else exchange.trajectory.id) != answers.run:
            return None
        try:
            body = answers.to(request.content if request.url.path.endswith("/chat/completions") else b"{}")
        except OtherWay:
            exchange.drop()
            raise
        if body is None:
            return None
        exchange.drop()
        call.takes_empty = True  # the app took even an empty answer when it was recorded
        kind = "text/event-stream" if body.startswith(b"data:") else "application/json"
        response = library.Response(200, headers={"content-type": kind}, content=body, request=request)
        response.elapsed = timedelta(0)
        return response


def _whole(asked: Mapping[str, Any], choices: Sequence[JSON]) -> bytes:
    return json.dumps(
        _about(asked, "chat.completion") | {"choices": [{**one, "logprobs": None} for one in choices]}
    ).encode()


def _events(asked: Mapping[str, Any], choices: Sequence[JSON]) -> bytes:
    about = _about(asked, "chat.completion.chunk")
    usage = about.pop("usage")
    chunks: list[JSON] = []
    for one in choices:
        calls = [{"index": place, **call} for place, call in enumerate(one["message"].get("tool_calls") or ())]
        delta = {**one["message"], **({"tool_calls": calls} if calls else {})}
        said = {"index": one["index"], "delta": delta, "finish_reason": None}
        end = {"index": one["index"], "delta": {}, "finish_reason": one["finish_reason"]}
        chunks += [about | {"choices": [said]}, about | {"choices": [end]}]
    if (asked.get("stream_options") or {}).get("include_usage"):
        chunks.append(about | {"choices": [], "usage": usage})
    return b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks) + b"data: [DONE]\n\n"


def _about(asked: Mapping[str, Any], kind: str) -> dict[str, Any]:
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return {"id": "recorded", "object": kind, "created": int(time.time()), "model": asked.get("model"), "usage": usage}


# Name under which a script is loaded. It is not `__main__`, so code below `if __name__ == "__main__"` does not run.
_MODULE = "__replayed_main__"

_READY_S = 10.0  # seconds until a champion must serve; the first read of the store may take seconds
_FLUSH_S = 30.0  # seconds that the recorder gets to write a run


def main(target: str, *, redacted: bool) -> None:
    """Load the function `target`, `MODULE:NAME` or `SCRIPT:NAME`, and repeat runs until standard input ends.

    With `redacted`, nothing runs unless the app's own settings redact what is recorded.
    """
    questions, answers = _own_pipes()

    def say(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    given = {name: os.environ.get(f"ART_PATCH_{name.upper()}") for name in ("project", "home", "store")}
    # Every run is routed and recorded, whatever settings the app gave to `patch()`.
    patch_again = partial(patch_around, mode="route", sample_rate=1.0, **given)
    note_no_more()
    try:
        function = load(target)
        patch_again()
        if redacted and not redacts(all):
            raise ConfigError(
                "what the app records is redacted, and here nothing would be; put art_patch.patch(redact=...) at the "
                "top level of its module, or set ART_PATCH_REDACT for the job, too"
            )
        _wait_for_champion()
        intercepted = Intercepted()
    except BaseException as error:  # importing a module can raise anything, `SystemExit` included
        said = str(error) if isinstance(error, ArtPatchError) else f"{type(error).__name__}: {error}"
        say({"error": said[:300]})
        return
    say({"ready": True})
    # One event loop for all runs: an HTTP client keeps connections that belong to the loop of its first run.
    with asyncio.Runner() as loop:
        for line in questions:
            patch_again()  # because the previous run may have called `unpatch()`
            question = json.loads(line)
            intercepted.answers = RecordedAnswers(question.get("given"), question["trajectory"]["id"])
            ended = _repeat(function, question, loop)
            say(ended | {"came_there": intercepted.answers.reached and not intercepted.answers.strayed})


def load(target: str) -> Callable[..., Any]:
    """Import the module or script and return its `replayable` function; a `ConfigError` if it offers none."""
    module, _, name = target.rpartition(":")
    # Resolved, because modules beside the script are imported first. Beside a mere link to it could lie anything.
    script = Path(module).resolve() if os.path.isabs(module) else None
    source = _source_of_module(module) if script is None else _source_of_script(script)
    if not _offers(source, name):
        raise _not_offered(target)
    if script is not None:
        module = _load_script(script)
    else:
        sys.argv[:] = [module]
        import_module(module)
    function = offered(module, name)
    if function is None:  # the source has the mark, but behind a condition that is false here
        raise _not_offered(target)
    return function


def _not_offered(target: str) -> ConfigError:
    return ConfigError(f"{target} is not offered; put @art_patch.replayable above it")


def _source_of_script(path: Path) -> bytes:
    here = Path.cwd().resolve()
    if not path.resolve().is_relative_to(here):
        raise ConfigError(f"the script lies outside of {here}; start `art-patch retrain` in the directory of the app")
    if not path.is_file():
        raise ConfigError("there is no such script any more")
    return path.read_bytes()


def _source_of_module(module: str) -> bytes:
    """Return the source of a module without importing it; empty if it is no Python file."""
    first, *rest = module.split(".")
    try:
        spec = find_spec(first) if first else None
    except ValueError:  # a module that is loaded and has no spec
        spec = None
    for part in rest:
        # `find_spec` would import the packages around it. A part's name alone is looked for in just these directories.
        inside = None if spec is None else spec.submodule_search_locations
        spec = None if inside is None else PathFinder.find_spec(part, list(inside))
    if spec is None:
        raise ModuleNotFoundError(f"No module named {module!r}")
    file = spec.origin if spec.has_location else None
    return Path(file).read_bytes() if file is not None and file.endswith(".py") else b""


def _offers(source: bytes, name: str) -> bool:
    """Return whether the source marks a function of this name: `@replayable` above it, or a call `replayable(name)`.

    Only marks at the top level count. `replayable` may be an attribute (`art.replayable`) or imported under another
    name. Marks that code sets in other ways, such as in a loop over functions, are not found.
    """
    nodes = list(_top_level(ast.parse(source)))
    imports = [alias for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    words = {"replayable", *(each.asname for each in imports if each.name == "replayable" and each.asname)}

    def is_replayable(node: ast.expr) -> bool:
        return node.attr == "replayable" if isinstance(node, ast.Attribute) else _is_name(node, words)

    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == name and any(map(is_replayable, node.decorator_list)):
                return True
        elif isinstance(node, ast.Call) and is_replayable(node.func):
            given = (*node.args, *(each.value for each in node.keywords))
            if any(_is_name(each, {name}) for each in given):
                return True
    return False


def _is_name(node: ast.expr, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _top_level(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when the module is imported: nothing inside functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _top_level(child)


def _load_script(path: Path) -> str:
    sys.argv[:] = [str(path)]
    # As Python does for a script: modules beside it are found first.
    sys.path.insert(0, str(path.parent))
    spec = spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file")
    sys.modules[_MODULE] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return _MODULE


def _own_pipes() -> tuple[TextIO, TextIO]:
    """Return standard input and output for questions and answers, and give the app `/dev/null` in their place."""
    # Otherwise a `print` of the app would be read as an answer. The app's children do not inherit what `dup` makes.
    questions = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    return questions, answers


def _wait_for_champion() -> None:
    until = time.monotonic() + _READY_S
    while (now := status()).champion is None or now.base_url is None:
        if time.monotonic() > until:
            raise EngineError("no policy serves here; start `art-patch serve`")
        time.sleep(0.05)


def _repeat(function: Callable[..., Any], question: Mapping[str, Any], loop: asyncio.Runner) -> dict[str, Any]:
    key, raised = question["group"], None
    try:
        with group(key) if key else nullcontext(), trajectory(**question["trajectory"]):
            result = function(*question["args"], **question["kwargs"])
            if inspect.isawaitable(result):
                # With this run's context. A runner would otherwise reuse the context of the first run.
                loop.run(_result_of(result), context=copy_context())
    except BaseException as error:  # a run may also end with `sys.exit()`
        raised = type(error).__name__
    # The job reads the run as soon as it gets this answer, so the run must be in the store before.
    return {"raised": raised, "written": flush(_FLUSH_S)}


async def _result_of(work: Awaitable[Any]) -> Any:
    return await work


if __name__ == "__main__":
    main(sys.argv[1], redacted=sys.argv[2:] == ["redacted"])
