"""Checks the engine's answer, and rewrites it into the answer that the app has asked for. Bytes in, bytes out.

The SDK accepts HTML, `{}` and a stream that stops half-way as success, so an answer is checked before the app gets it.
An answer that is not streamed must name the policy that was asked and have all choices; each choice needs a finish
reason and a message with content (see `says_something`). White space is no content. The first event of a stream must be
a chunk of that policy, and no byte of the stream reaches the app before it has content or reasoning.

Training needs token ids and log-probabilities, so the engine always sends them; here they are removed unless the app
has asked for them. `model` becomes the name that the app used, and `system_fingerprint` names the policy.

`responses_rewriter` derives from both classes: it makes the same checks, and returns objects of the Responses API.
"""

import json
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic_core import from_json, to_json

DONE = b"[DONE]"

MOST_BYTES = 64 << 20  # of an answer of the engine; four times that of a streamed one


class InvalidAnswer(Exception):
    """The engine's answer is invalid and must not reach the app. The message says what is wrong with the answer."""


class EmptyAnswer(InvalidAnswer):
    """The engine's answer has no text, tool call, refusal or audio.

    The call then goes upstream. If upstream fails too, the engine is asked once more; the app gets even an empty
    answer.
    """

    def __init__(self) -> None:
        super().__init__("it is empty, without text or a tool call")


class TooSlow(InvalidAnswer):
    """The first chunk of the engine's stream did not arrive within `first_token_timeout_s`."""


@dataclass(frozen=True, slots=True)
class ResponseRewriter:
    """Checks and rewrites the engine's answer to one request."""

    policy: str  # name of the policy that was asked; an answer of any other model is invalid
    requested_model: str  # the model name in the app's request, which the rewritten answer shows
    n: int  # number of choices that the app has asked for
    keeps_logprobs: bool  # whether the app has asked for log-probabilities itself; so too `keeps_token_ids`
    keeps_token_ids: bool
    # Whether an answer without text, tool call, refusal or audio is accepted.
    takes_empty: bool = field(default=False, kw_only=True)

    def whole(self, body: bytes) -> bytes:
        """Return the rewritten body of an answer that was not streamed. Raise `InvalidAnswer` if it is invalid."""
        try:
            unread = not self.keeps_logprobs and not self.keeps_token_ids
            answer = self.checked(without_proof(body) if unread else body)
        except InvalidAnswer:  # perhaps because of the cut, so the whole body is read before the answer is refused
            answer = self.checked(body)
        self.strip(answer)
        return dump(answer)

    def checked(self, body: bytes) -> dict[str, Any]:
        """Return the engine's answer as JSON; raise `InvalidAnswer` if it is invalid."""
        answer = _parse(body)
        self._check_policy(answer)
        choices: Any = answer.get("choices")
        if not isinstance(choices, list) or len(cast("list[Any]", choices)) < self.n:
            raise InvalidAnswer("choices are missing")
        for given in cast("list[Any]", choices):
            choice = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
            if not isinstance(choice.get("message"), dict):
                raise InvalidAnswer("a choice has no message")
            if choice.get("finish_reason") is None:
                raise InvalidAnswer("a choice has no finish reason")
            if not self.takes_empty and not says_something(choice["message"]):
                raise EmptyAnswer
        return answer

    def stream(self) -> "StreamRewriter":
        """Return a rewriter for the answer to the same request if it is streamed."""
        return StreamRewriter(self)

    def check_chunk(self, chunk: dict[str, Any]) -> None:
        """Check the first chunk of a stream: raise `InvalidAnswer` if it is of another model or has no choices."""
        self._check_policy(chunk)
        if not isinstance(chunk.get("choices"), list) or not chunk["choices"]:
            raise InvalidAnswer("the first event has no choices")

    def strip(self, answer: dict[str, Any]) -> None:
        """Remove the fields that the app did not ask for from an answer or a chunk, and set its model name."""
        keeps_ids, keeps_logprobs = self.keeps_token_ids, self.keeps_logprobs
        answer["model"], answer["system_fingerprint"] = self.requested_model, self.policy
        if not keeps_ids:
            answer.pop("prompt_token_ids", None)
        _drop_nulls(answer, _NULLS_OF_ANSWER)
        for choice in answer.get("choices") or ():
            if not keeps_ids:
                choice.pop("token_ids", None)
            if not keeps_logprobs and "logprobs" in choice:
                choice["logprobs"] = None
            _drop_nulls(choice, _NULLS_OF_CHOICE)
            said = choice.get("message") or choice.get("delta")
            if said:
                _drop_nulls(said, _NULLS_OF_MESSAGE)

    def _check_policy(self, answer: dict[str, Any]) -> None:
        if answer.get("error"):
            raise InvalidAnswer("it holds an error")
        if answer.get("model") != self.policy:
            raise InvalidAnswer("it comes from another model")


def says_something(said: dict[str, Any]) -> bool:
    """Return whether a message or delta has text, a tool call, a refusal or audio. Reasoning alone does not count."""
    content, refusal = said.get("content"), said.get("refusal")
    return bool(
        (content.strip() if isinstance(content, str) else content)
        or (refusal.strip() if isinstance(refusal, str) else refusal)
        or (said.get("tool_calls") or said.get("function_call") or said.get("audio"))
    )


# vLLM adds these to OpenAI's format, as nulls. Apps send messages back to their provider as they came, and a provider
# refuses fields that it does not know.
_NULLS_OF_ANSWER = ("prompt_logprobs", "prompt_text", "kv_transfer_params", "ec_transfer_params", "metrics")
_NULLS_OF_CHOICE = ("stop_reason", "routed_experts")
_NULLS_OF_MESSAGE = ("reasoning", "reasoning_content", "annotations", "audio", "function_call")


def _drop_nulls(part: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        if part.get(name, name) is None:
            del part[name]


_LOGPROBS = b',"logprobs":'
_FINISH = b',"finish_reason":'
_IDS = (b',"token_ids":[', b',"prompt_token_ids":[')


def without_proof(body: bytes) -> bytes:
    """Return the body without log-probabilities and token ids, which are nine tenths of it. JSON is not parsed.

    It stays unchanged if it has several choices, or if its fields are not in the order of vLLM or the embedded engine.
    """
    # A raw `,"name":` is always a key, because a quote inside a string is escaped.
    start = body.find(_LOGPROBS)
    # From the end, because thousands of `,"logprob":` make a forward search take six times as long.
    end = body.rfind(_FINISH)
    if not 0 <= start < end or body.find(_FINISH[1:], 0, end) >= 0:
        return body
    rest = body[end:]
    for key in _IDS:
        before, found, after = rest.partition(key)
        if found:  # the list holds numbers only, so the first bracket ends it
            rest = before + after[after.find(b"]") + 1 :]
    return b"".join((body[:start], _LOGPROBS, b"null", rest))


class StreamRewriter:
    """Checks and rewrites a stream event by event: `feed` takes the network's bytes and returns those for the app.

    Attributes:
        begun: whether the first chunk has arrived and was accepted.
        started: whether every choice of the stream has brought content, or for chat also reasoning. Before that the app
            must get no byte, because the call may still go upstream.
        unread: the bytes that `feed` began to process last. If it fails, the app gets them unchanged.
    """

    shows_reasoning = True  # whether the app sees reasoning as it comes, which may take minutes

    def __init__(self, rewriter: ResponseRewriter) -> None:
        self._rewriter = rewriter
        self._rest: list[bytes] = []
        self._size = 0
        self.unread = b""
        self._finished: set[int] = set()
        self._silent = set(range(rewriter.n))  # choices without content so far
        self.begun = self.started = False

    def feed(self, data: bytes) -> bytes:
        """Return the rewritten bytes of all complete lines; keep the rest. Raise `InvalidAnswer` if one is invalid."""
        self._size += len(data)
        if self._size > 4 * MOST_BYTES:  # the event of a token repeats its frame
            raise InvalidAnswer("the stream does not end")
        if self._rest:
            self._rest.append(data)
            if b"\n" not in data:  # joined once, when the line is whole: a long line may come in many pieces
                return b""
            data, self._rest = b"".join(self._rest), []
        self.unread = data
        if data.startswith(b"data: {") and data.endswith(b"\n\n") and data.find(b"\n") == len(data) - 2:
            return self._line(data)  # one whole event, as engines send them: nothing to split or join
        cut = data.rfind(b"\n") + 1
        self._rest = [data[cut:]] if cut < len(data) else []
        if not cut:
            return b""
        return b"".join(map(self._line, data[:cut].splitlines(keepends=True)))

    def end(self) -> bytes:
        """Return the rewritten rest when the stream has ended; raise `InvalidAnswer` if a choice was not finished."""
        rest, self._rest = b"".join(self._rest), []
        out = self._line(rest) if rest else b""
        self._check_finished()
        return out

    def _line(self, line: bytes) -> bytes:
        if not line.startswith(b"data:"):
            return self._between(line)
        payload = line[5:].strip()
        if payload.startswith(DONE):
            self._check_finished()
            return self._last(line)
        chunk = _parse(payload)
        if not self.begun:
            self._rewriter.check_chunk(chunk)
            self.begun = True
        elif chunk.get("error"):
            if not self.started:
                raise InvalidAnswer("it holds an error")
            return self._error(line)
        choices: Any = chunk.get("choices") or []
        if not isinstance(choices, list):
            raise InvalidAnswer("choices are missing")
        for choice in cast("list[Any]", choices):
            if not isinstance(choice, dict):
                raise InvalidAnswer("a choice is none")
            choice = cast("dict[str, Any]", choice)
            index = choice.get("index", 0)
            if not self.started and isinstance(choice.get("delta"), dict):
                if says_something(choice["delta"]) or self._reasons(choice["delta"]):
                    self._silent.discard(index)
                self.started = not self._silent
            if choice.get("finish_reason") is not None:
                if index in self._silent and not self._rewriter.takes_empty:
                    raise EmptyAnswer
                self._finished.add(index)
        return self._chunk(chunk, line)

    def _reasons(self, delta: dict[str, Any]) -> bool:
        return self.shows_reasoning and bool(delta.get("reasoning") or delta.get("reasoning_content"))

    # What is handed out.

    def _between(self, line: bytes) -> bytes:
        """Return what is handed out for a line without data."""
        return line

    def _chunk(self, chunk: dict[str, Any], line: bytes) -> bytes:
        self._rewriter.strip(chunk)
        end = b"\n\n" if line.endswith(b"}\n\n") else line[len(line.rstrip(b"\r\n")) :]
        return b"data: " + dump(chunk) + end

    def _error(self, line: bytes) -> bytes:
        """Return what is handed out for an error in place of a chunk. The SDK raises it as its own."""
        return line

    def _last(self, line: bytes) -> bytes:
        return line

    def _check_finished(self) -> None:
        if not self.begun:
            raise InvalidAnswer("the stream has no event")
        if len(self._finished) < self._rewriter.n:
            raise InvalidAnswer("the stream ended without a finish reason")
        if not self.started and not self._rewriter.takes_empty:
            raise EmptyAnswer


def _parse(data: bytes) -> dict[str, Any]:
    # pydantic's parser and writer take a third of the time, but refuse lone surrogates.
    try:
        value = from_json(data)
    except ValueError:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            raise InvalidAnswer("it is not JSON") from None
    if not isinstance(value, dict):
        raise InvalidAnswer("it is not a JSON object")
    return cast("dict[str, Any]", value)


def dump(value: dict[str, Any]) -> bytes:
    """Return `value` as compact JSON in bytes."""
    try:
        return to_json(value)
    except ValueError:
        return json.dumps(value, separators=(",", ":")).encode()
