"""Forward a chat completion to a vLLM replica.

If a replica is full or fails before the first byte of its answer, the request goes to another replica; if there is
none, the caller gets 429 or 503. If it fails later, the server closes the caller's connection without completing the
response, so that no client takes a partial answer for a complete one.
"""

import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import takewhile
from typing import Any

import aiohttp

from art_patch._lib.asgi import Caller
from art_patch._lib.http_guard import ApiError
from art_patch._lib.loose_json import as_object
from art_patch.errors import EngineError
from art_patch.serving.contract import EngineFull
from art_patch.serving.request_checks import ChatRoute, accepted_wait_s, parse_object, refuse_unsupported
from art_patch.serving.vllm.replica import NOT_A_NUMBER, Loaded, Replica

_log = logging.getLogger(__name__)

_PASSED = ("content-type", "content-length", "cache-control")


class Forward(ChatRoute[tuple[bytes, str, bytes, int]]):
    """ASGI application that answers chat completions by forwarding them to vLLM; one instance answers all requests."""

    def __init__(
        self,
        answering: Callable[[str], AbstractContextManager[Loaded]],
        choose: Callable[[bytes, Sequence[Replica]], Replica | None],
        reload: Callable[[Replica, Loaded], Awaitable[None]],
    ) -> None:
        """Takes the methods of `VllmEngine` that it needs; the engine itself imports this module."""
        super().__init__()
        self._answering, self._choose, self._reload = answering, choose, reload

    def understand(self, body: bytes) -> tuple[bytes, str, bytes, int]:
        """Returns the body, the name of the policy that is asked, the conversation's beginning, and `rows_of`."""
        fields = parse_object(body)
        return body, check_request(fields), conversation_of(fields), rows_of(fields)

    async def answer(self, caller: Caller, request: tuple[bytes, str, bytes, int]) -> None:
        """Asks one replica after another until the caller has its answer."""
        body, model, conversation, rows = request
        accepted_s, full = accepted_wait_s(caller), None
        tried: list[Replica] = []
        with self._answering(model) as policy:
            while (replica := self._choose(conversation, tried)) is not None:
                tried.append(replica)
                try:
                    replica.occupancy.check(rows, accepted_s)
                except EngineFull as error:
                    full = error
                    continue
                replica.occupancy.rows += rows
                try:
                    if await self._ask(caller, replica, policy, body):
                        return
                finally:
                    replica.occupancy.rows -= rows
        raise full or ApiError(503, "no vLLM takes requests just now; it is being started again", code="overloaded")

    async def _ask(self, caller: Caller, replica: Replica, policy: Loaded, body: bytes, *, again: bool = True) -> bool:
        """Returns whether the caller got its answer; if not, another replica may be asked."""
        replica.running += 1
        try:
            async with replica.link.chat(body) as response:
                if response.status == 200:
                    await _pass_on(caller, response)
                    return True
                return await self._refused(caller, replica, policy, body, response, again=again)
        except (aiohttp.ClientError, OSError) as error:
            if caller.started:
                # Returning without an end has the server close the connection, which is what the caller must see.
                _log.warning("an answer of %s broke off: %s", policy.name, error)
            return caller.started
        finally:
            replica.running -= 1

    async def _refused(
        self, caller: Caller, replica: Replica, policy: Loaded, body: bytes, response: Any, *, again: bool
    ) -> bool:
        content: bytes = await response.read()
        # Not one bad request: the process may answer everybody with NaN from now on, so it is restarted.
        if NOT_A_NUMBER in content:
            replica.condemn("it answered with numbers that are not finite")
            return False
        if response.status >= 500:
            return False
        if response.status == 404 and again:  # the engine serves it, so this replica has lost it
            try:
                await self._reload(replica, policy)
            except EngineError as error:
                replica.condemn(f"it lost {policy.name}: {error}")
                return False
            return await self._ask(caller, replica, policy, body, again=False)
        self.log_refusal(response.status, content[:500].decode(errors="replace"))
        await caller.answer(response.status, [(b"content-type", b"application/json")], content)
        return True


async def _pass_on(caller: Caller, response: Any) -> None:
    given = response.headers
    await caller.begin(200, [(name.encode(), given[name].encode("latin-1")) for name in _PASSED if name in given])
    # Whatever has arrived goes out at once: a streamed token must not wait for a full buffer.
    async for chunk in response.content.iter_any():
        await caller.write(chunk)
    await caller.end()


# Other fields are refused: vLLM ignores fields that it does not know, so an answer could silently differ from what was
# asked for. `prompt_logprobs` and `echo` are left out on purpose: with a LoRA in the batch vLLM 0.32 ends over them,
# and all its running answers with it.
_UNDERSTOOD = frozenset({
    "add_generation_prompt", "allowed_token_ids", "bad_words", "chat_template_kwargs", "continue_final_message",
    "frequency_penalty", "ignore_eos", "include_reasoning", "include_stop_str_in_output", "logit_bias",
    "logprobs", "max_completion_tokens", "max_tokens", "messages", "min_p", "min_tokens", "model", "n",
    "parallel_tool_calls", "presence_penalty", "priority", "reasoning_effort",
    "repetition_penalty", "response_format", "return_token_ids", "seed", "skip_special_tokens",
    "spaces_between_special_tokens", "stop", "stop_token_ids", "stream", "stream_options", "structured_outputs",
    "temperature", "tool_choice", "tools", "top_k", "top_logprobs", "top_p", "truncate_prompt_tokens",
})  # fmt: skip


def check_request(fields: Mapping[str, Any]) -> str:
    """Checks the fields of a chat request and returns the policy name in `model`; raises an `ApiError` (400)."""
    given = {name: value for name, value in fields.items() if value is not None}
    refuse_unsupported(given, _UNDERSTOOD)
    model = given.get("model")
    if not isinstance(model, str) or not model:
        raise ApiError(400, "model must be a string", param="model")
    if not isinstance(given.get("messages"), list) or not given["messages"]:
        raise ApiError(400, "messages must be a list that is not empty", param="messages")
    return model


def rows_of(fields: Mapping[str, Any]) -> int:
    """Returns how many rows of a vLLM a request takes, which is one for each choice; 0 if it waits for apps."""
    n, priority = fields.get("n"), fields.get("priority")
    return 0 if isinstance(priority, int) and priority > 0 else n if isinstance(n, int) else 1


def conversation_of(fields: Mapping[str, Any]) -> bytes:
    """Returns the messages before the assistant's first answer: they are the same in every call of a conversation."""
    roles = ("system", "developer", "user")
    opening = takewhile(lambda message: as_object(message).get("role") in roles, fields["messages"])
    return json.dumps(list(opening)).encode()
