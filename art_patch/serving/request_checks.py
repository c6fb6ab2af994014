"""Request checks of both engines: read a chat request's body, and refuse unsupported parameters.

The engine accepts a parameter if it implements it, if the parameter does not change the answer, or if its value is the
neutral one. It refuses any other with 400: to ignore it would give the caller another answer than it asked for.
"""

import asyncio
import logging
import math
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar, cast

from pydantic_core import from_json
from starlette.types import Receive, Scope, Send

from art_patch._lib.asgi import ApiError, Caller, Gone
from art_patch.types import WAIT_HEADER

_LARGE_BODY_BYTES = 64 << 10  # reading more than this on the event loop would hold up all streams

_log = logging.getLogger(__name__)

T = TypeVar("T")

POLICY = "art_patch.policy"
"""Key of the ASGI scope of a request: the policy that it asks for, once it is understood."""

# Fields that identify the caller and leave the answer as it is.
_WITHOUT_EFFECT = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
# Accepted with these values only, because with them the parameter changes nothing. SDKs and agent frameworks send many
# of these on every call without being asked to.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs", "min_p", "min_tokens"), (0,)),
    **dict.fromkeys(("store", "use_beam_search", "echo", "continue_final_message"), (False,)),
    **dict.fromkeys(("include_reasoning", "skip_special_tokens", "add_generation_prompt"), (True,)),
    **dict.fromkeys(("functions", "stop_token_ids"), ([],)),
    "logit_bias": ({},),
    "repetition_penalty": (1,),
    "top_k": (0, -1),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
}


def refuse_unsupported(fields: Mapping[str, Any], understood: Collection[str]) -> None:
    """Raises an `ApiError` (400) for the first request field that the engine neither implements nor may ignore."""
    for key, value in fields.items():
        if key in understood or key in _WITHOUT_EFFECT:
            continue
        if not any(value == neutral for neutral in _NEUTRAL.get(key, ())):
            raise unsupported(f"{key} = {short(value)} is not supported by this engine; leave it out", key)


def unsupported(message: str, param: str) -> ApiError:
    """Returns, without raising it, the 400 error for a parameter that the engine does not support."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def parse_object(body: bytes) -> dict[str, Any]:
    """Decodes a request body; raises an `ApiError` (400) if it is not a JSON object."""
    try:
        # Unlike `json`, it refuses half of a surrogate pair, which no tokenizer takes, and deep nesting.
        parsed = from_json(body)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise ApiError(400, "the body must be a JSON object")
    return cast("dict[str, Any]", parsed)


def accepted_wait_s(caller: Caller) -> float | None:
    """Returns the seconds that a request accepts to wait for its turn (`WAIT_HEADER`); `None` for any."""
    given = next((value for name, value in caller.headers if name == WAIT_HEADER.encode()), None)
    try:
        # NaN becomes 0, and infinity a day.
        return None if given is None else min(max(0.0, float(given)), 86_400.0)
    except ValueError:
        raise ApiError(400, f"the header {WAIT_HEADER} is not a number of seconds") from None


class ChatRoute(Generic[T]):
    """ASGI application that answers chat completions; an engine adds how it understands a body and answers it."""

    _logged_at = -math.inf

    def __init__(self) -> None:
        # One large body after the other, because parsing and tokenising take many times a body's own memory.
        self._one = ThreadPoolExecutor(1, thread_name_prefix="art-patch-large-body")

    # Plain ASGI, because every chat request passes through it.
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one chat-completion request; the server turns what it raises into an error response."""
        caller = Caller(scope, receive, send)
        if caller.method != "POST":
            raise ApiError(405, "use POST")
        try:
            body = await caller.body()
            if len(body) <= _LARGE_BODY_BYTES:
                # Small bodies are read here: a thread costs more than it saves.
                request = self.understand(body)
                scope[POLICY] = self.policy_of(request)
                await caller.while_here(self.answer(caller, request))
            else:
                await caller.while_here(self._answer_large(caller, body, scope))
        except Gone:
            pass
        except ApiError as error:
            self.log_refusal(error.status, str(error))
            raise

    def log_refusal(self, status: int, words: str) -> None:
        """Logs why a request was refused, at most once a minute."""
        if (now := time.monotonic()) - self._logged_at >= 60:
            self._logged_at = now
            # The words may repeat what the caller sent.
            _log.warning("a chat completion was refused with HTTP %d: %s", status, ascii(words[:500])[1:-1])

    async def _answer_large(self, caller: Caller, body: bytes, scope: Scope) -> None:
        # If the caller leaves, what waits for the thread is dropped.
        request = await asyncio.get_running_loop().run_in_executor(self._one, self.understand, body)
        scope[POLICY] = self.policy_of(request)
        del body  # the answer may take minutes
        await self.answer(caller, request)

    def understand(self, body: bytes) -> T:
        """Checks a request body and returns what `answer` needs of it; may run in any thread."""
        raise NotImplementedError

    def policy_of(self, request: T) -> str:
        """Returns the name that a request asks for."""
        raise NotImplementedError

    async def answer(self, caller: Caller, request: T) -> None:
        """Sends the answer to a request; cancelled if the caller disconnects."""
        raise NotImplementedError


def short(value: object) -> str:
    """Returns the `repr` of a value for an error message, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
