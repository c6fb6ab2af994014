"""Checking the champion's answer and making it look like the one the app asked for. Bytes in, bytes out.

The SDK takes HTML, `{}` or a stream that stops half-way as success, so nothing is handed out before it is checked:
a whole answer needs choices, each with a message that says something and a finish reason, from the policy that was
asked; a stream's first event must be a chunk of that policy, and the stream is held back until it says something. White
space alone says nothing. What was added for training (token ids, log-probabilities the app did not ask
for) is taken out, and `model` is the name the app used. `system_fingerprint` names the policy.

For a surface that is not chat both classes are derived (`responses_answer`, `responses_stream`): what is checked stays
the same, what is handed out differs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic_core import from_json, to_json

DONE = b"[DONE]"


class InvalidAnswer(Exception):
    """The engine's answer must not reach the app; the message says what is wrong with it."""


class EmptyAnswer(InvalidAnswer):
    """It says nothing. Upstream is asked; if that has no answer either, this one is better than an error."""

    def __init__(self) -> None:
        """Say so."""
        super().__init__("it is empty, without text or a tool call")


class TooSlow(InvalidAnswer):
    """The stream did not begin in time."""


@dataclass(frozen=True, slots=True)
class ResponseRewriter:
    """What the app asked for, and who answers.

    Attributes:
        policy: the champion that was asked.
        requested_model: the name that the app used.
        n: how many choices it wants.
        keeps_logprobs: it asked for log-probabilities itself.
        keeps_token_ids: it asked for token ids itself.
        takes_empty: an answer that says nothing is an answer, too.
    """

    policy: str
    requested_model: str
    n: int
    keeps_logprobs: bool
    keeps_token_ids: bool
    takes_empty: bool = field(default=False, kw_only=True)

    def whole(self, body: bytes) -> bytes:
        """Return the checked and rewritten body of an answer that was not streamed.

        Raises:
            InvalidAnswer: if it is none.
        """
        try:
            unread = not self.keeps_logprobs and not self.keeps_token_ids
            answer = self.checked(without_proof(body) if unread else body)
        except InvalidAnswer:  # once more as it came, before it is said to be invalid
            answer = self.checked(body)
        self.strip(answer)
        return dump(answer)

    def checked(self, body: bytes) -> dict[str, Any]:
        """Return the answer as the engine gave it.

        Raises:
            InvalidAnswer: if it is none.
        """
        answer = _parse(body)
        self._check_policy(answer)
        choices: Any = answer.get("choices")
        if not isinstance(choices, list) or len(cast(list[Any], choices)) < self.n:
            raise InvalidAnswer("choices are missing")
        for choice in cast(list[Any], choices):
            if not isinstance(choice, dict) or not isinstance(cast(dict[str, Any], choice).get("message"), dict):
                raise InvalidAnswer("a choice has no message")
            if cast(dict[str, Any], choice).get("finish_reason") is None:
                raise InvalidAnswer("a choice has no finish reason")
            if not self.takes_empty and not says_something(cast(dict[str, Any], choice)["message"]):
                raise EmptyAnswer
        return answer

    def stream(self) -> StreamRewriter:
        """Return what does the same for a stream."""
        return StreamRewriter(self)

    def check_chunk(self, chunk: dict[str, Any]) -> None:
        """Check the first chunk of a stream.

        Raises:
            InvalidAnswer: if no answer of the champion's starts like that.
        """
        self._check_policy(chunk)
        if not isinstance(chunk.get("choices"), list) or not chunk["choices"]:
            raise InvalidAnswer("the first event has no choices")

    def strip(self, answer: dict[str, Any]) -> None:
        """Take out of an answer or chunk what the app did not ask for."""
        keeps_ids, keeps_logprobs = self.keeps_token_ids, self.keeps_logprobs
        answer["model"] = self.requested_model
        answer["system_fingerprint"] = self.policy
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
    """Return whether a message or delta has a word, a tool call, a refusal or a sound; reasoning is none of these."""
    content, refusal = said.get("content"), said.get("refusal")
    return bool(
        (content.strip() if isinstance(content, str) else content)
        or (refusal.strip() if isinstance(refusal, str) else refusal)
        or said.get("tool_calls")
        or said.get("function_call")
        or said.get("audio")
    )


# What vLLM adds to OpenAI's format and has nothing to say in. Apps send messages back to their provider as they came,
# and a provider refuses fields that it does not know.
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
    """Cut log-probabilities and token ids out unread: they are nine tenths of an answer, and the app gets none of them.

    A raw `,"name":` is always a key, because a quote inside a string is escaped. Where there are several choices, or
    the engine writes its fields in another order than vLLM and ours, nothing is cut.
    """
    start = body.find(_LOGPROBS)
    # From the end, and from a quote on: thousands of `,"logprob":` make a search for the like of it six times as long.
    end = body.rfind(_FINISH)
    if not 0 <= start < end or body.find(_FINISH[1:], 0, end) >= 0:
        return body
    rest = body[end:]
    for key in _IDS:
        before, found, after = rest.partition(key)
        if found:  # numbers up to the bracket
            rest = before + after[after.find(b"]") + 1 :]
    return b"".join((body[:start], _LOGPROBS, b"null", rest))


class StreamRewriter:
    """The same for a stream, event by event. Feed it what the network brings, hand out what it returns.

    Attributes:
        begun: a chunk of the policy came.
        started: it says something. Until then nothing may be handed out, because upstream may have to answer instead.
        done: the engine announced the end.
        unread: what `feed` was given last, as it came.
    """

    def __init__(self, rewriter: ResponseRewriter) -> None:
        """Expect the first event."""
        self._rewriter = rewriter
        self._rest: list[bytes] = []
        self.unread = b""
        self._finished: set[int] = set()
        self.begun = False
        self.started = False
        self.done = False

    def feed(self, data: bytes) -> bytes:
        """Return the rewritten bytes of the lines that are complete.

        Raises:
            InvalidAnswer: if the stream is not, or no longer, a valid answer.
        """
        if self._rest:
            self._rest.append(data)
            if b"\n" not in data:  # joined once the line is whole: a long one may come in many pieces
                return b""
            data, self._rest = b"".join(self._rest), []
        self.unread = data
        if data.startswith(b"data: {") and data.endswith(b"\n\n") and data.find(b"\n") == len(data) - 2:
            return self._line(data)  # one event, whole, as engines send them
        cut = data.rfind(b"\n") + 1
        self._rest = [data[cut:]] if cut < len(data) else []
        if not cut:
            return b""
        return b"".join(map(self._line, data[:cut].splitlines(keepends=True)))

    def end(self) -> bytes:
        """Return what is left at the end of the stream.

        Raises:
            InvalidAnswer: if the stream was cut before every choice was finished.
        """
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
            self.done = True
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
        for choice in cast(list[Any], choices):
            if not isinstance(choice, dict):
                raise InvalidAnswer("a choice is none")
            choice = cast(dict[str, Any], choice)
            if choice.get("finish_reason") is not None:
                self._finished.add(choice.get("index", 0))
            if not self.started and isinstance(choice.get("delta"), dict):
                self.started = self._shows(choice["delta"])
        return self._chunk(chunk, line)

    # What is handed out.

    def _shows(self, delta: dict[str, Any]) -> bool:
        """Whether the app is to see a chunk at once. Reasoning is shown as it comes, which may take minutes."""
        return says_something(delta) or bool(delta.get("reasoning") or delta.get("reasoning_content"))

    def _between(self, line: bytes) -> bytes:
        """A line that holds no data."""
        return line

    def _chunk(self, chunk: dict[str, Any], line: bytes) -> bytes:
        self._rewriter.strip(chunk)
        end = b"\n\n" if line.endswith(b"}\n\n") else line[len(line.rstrip(b"\r\n")) :]
        return b"data: " + dump(chunk) + end

    def _error(self, line: bytes) -> bytes:
        """An error in the place of a chunk; the SDK turns it into its own."""
        return line

    def _last(self, line: bytes) -> bytes:
        """The end that the engine announced."""
        return line

    def _check_finished(self) -> None:
        if not self.begun:
            raise InvalidAnswer("the stream has no event")
        if len(self._finished) < self._rewriter.n:
            raise InvalidAnswer("the stream ended without a finish reason")
        if not self.started and not self._rewriter.takes_empty:
            raise EmptyAnswer


def _parse(data: bytes) -> dict[str, Any]:
    # pydantic's parser and writer cost a third of the standard library's, which also know lone surrogates.
    try:
        value = from_json(data)
    except ValueError:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            raise InvalidAnswer("it is not JSON") from None
    if not isinstance(value, dict):
        raise InvalidAnswer("it is not a JSON object")
    return cast(dict[str, Any], value)


def dump(value: dict[str, Any]) -> bytes:
    """Return JSON."""
    try:
        return to_json(value)
    except ValueError:
        return json.dumps(value, separators=(",", ":")).encode()
