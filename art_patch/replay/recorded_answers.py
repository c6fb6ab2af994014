"""Gives the calls of a repeated run the answers that were recorded, up to the turn at which a policy goes on.

The function runs from its start, so its variables and tools are in the state that they had at this turn. Its calls are
recognised by their prompts, in any order, as parallel calls come. A call whose prompt the recorded run did not have,
before it went on from the turn, shows that the run took another way, for example because a tool found something else;
the run is stopped there. Calls that belong to another run, such as one that the function opens in itself or a task that
an earlier run has left behind, are none of this run's, neither here nor in what was recorded; a policy answers them.
Calls that get a recorded answer are not recorded again. Nothing of this runs in the app's own processes.
"""

import json
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from threading import Lock
from typing import Any

import wrapt

from art_patch.patching import pending_call
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
