"""Conversations: the id of each message by its content and place, and the main conversation of a trajectory.

A message in its place is called a node. Its id is a 16-byte BLAKE2b hash of its parent's id and of its own canonical
JSON. So if one conversation continues another, their common messages have the same ids, and the store writes each
message once. The recorder finds a call's trajectory alike, with a hash of fewer fields (`recording.converting`).

Grouping, rewards and gate all read a run through `transcript` and its neighbours. The transcript is the prompt and the
answer of the call with the most messages: an agent sends its whole history with each call, so this is the run from the
user's question to its end. Other conversations in the run, such as those of a sub-agent or a classifier, are left out.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from pydantic_core import PydanticSerializationError, to_json

from art_patch.types import JSON, Call, Choice, Trajectory, TrajectoryInfo

# The parent of a conversation's first message.
ROOT = b""

# Made once: `json.dumps` makes an encoder for each call that has arguments.
_canonical = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=repr).encode
_verbatim = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=repr).encode

_EMPTY: tuple[Any, ...] = (None, "", [], ())


class Link(NamedTuple):
    """A message of a conversation, with its id and the id of the message before it."""

    node: bytes  # id of the message, which depends on its content and on all messages before it
    parent: bytes  # id of the message before it; `ROOT` for the first message
    body: bytes  # JSON of the message, with its keys in the order in which the client sent them


def canonical(message: JSON) -> bytes:
    """Return the message's canonical JSON as UTF-8: sorted keys, no white space, no empty values.

    Empty values are left out because some clients send an answer back with them (`"refusal": null`) and others without.
    """
    kept = {key: value for key, value in message.items() if value not in _EMPTY}
    return _canonical(kept).encode("utf-8", "surrogatepass")


def verbatim(value: Any) -> bytes:
    """Return `value` as JSON in UTF-8, with keys in their original order. `json.loads` restores lone surrogates."""
    return _verbatim(value).encode("utf-8", "surrogatepass")


def number_tool_calls(messages: Iterable[JSON]) -> tuple[JSON, ...]:
    """Return the messages with tool-call ids, which servers choose at random, replaced by `call_1`, `call_2`, ..."""
    numbers: dict[str, str] = {}

    def numbered(value: Mapping[str, Any], key: str) -> JSON:
        given = value.get(key)
        if not isinstance(given, str):
            return value
        return {**value, key: numbers.setdefault(given, f"call_{len(numbers) + 1}")}

    result: list[JSON] = []
    for message in messages:
        calls: Any = message.get("tool_calls")
        if isinstance(calls, list | tuple):
            message = {**message, "tool_calls": [numbered(c, "id") if isinstance(c, Mapping) else c for c in calls]}
        result.append(numbered(message, "tool_call_id"))
    return tuple(result)


def node_id(parent: bytes, message: JSON) -> bytes:
    """Return the 16-byte id of a message whose predecessor has the id `parent` (`ROOT` for a first message)."""
    return _id(parent, canonical(message))


def chain(messages: Iterable[JSON], parent: bytes = ROOT) -> Iterator[Link]:
    """Yield a `Link` for each message in order. `parent` is the id of the message before the first of them."""
    for message in messages:
        same, body = _both(message)
        node = _id(parent, same)
        # The body is the message as it came, since a chat template renders keys in the order in which it finds them.
        yield Link(node, parent, body)
        parent = node


def _id(parent: bytes, same: bytes) -> bytes:
    return blake2b(parent + b"\0" + same, digest_size=16).digest()


def _both(message: JSON) -> tuple[bytes, bytes]:
    """Return `canonical(message)` and `verbatim(message)`, for a message of texts alone in one pass."""
    texts: dict[str, bytes] = {}
    try:
        for key, value in message.items():
            # Nearly all messages hold only texts. For these, pydantic's writer does the same in a third of the time.
            if type(value) is not str:
                return canonical(message), verbatim(message)
            texts[key] = b"%b:%b" % (to_json(key), to_json(value))
    except PydanticSerializationError:  # the text holds a lone surrogate
        return canonical(message), verbatim(message)
    kept = [texts[key] for key in sorted(texts) if message[key]]
    return b"{%b}" % b",".join(kept), b"{%b}" % b",".join(texts.values())


def prompt_key(messages: Iterable[JSON], tools: Iterable[JSON]) -> str:
    """Return a hash of a whole prompt in hex digits. Ids of tool calls are part of it, because templates show them."""
    parts = (*map(canonical, messages), b"", *map(canonical, tools))
    return blake2b(b"\0".join(parts), digest_size=16).hexdigest()


# --- the main conversation ---


def main_call(trajectory: Trajectory) -> Call | None:
    """Return the call with the longest conversation, of several the latest; `None` if no call was recorded."""
    # From the end, because an agent that forgets its oldest messages keeps the length and goes on.
    latest_first = reversed(trajectory.calls)
    return max(latest_first, key=lambda call: len(call.messages) + bool(call.choices), default=None)


def transcript(trajectory: Trajectory) -> tuple[JSON, ...]:
    """Return the messages of the run's longest conversation, with its last answer; empty if no call was recorded."""
    call = main_call(trajectory)
    return () if call is None else _with_answer(call)


def as_run(key: str, messages: Sequence[JSON], tools: Iterable[JSON], *, what: str) -> Trajectory:
    """Return messages that no app recorded as a run of one call that is never trained on; `what` says what they are.

    This is the inverse of `transcript`. A run that does not end with the model's message was broken off.
    """
    if not messages:
        return Trajectory(TrajectoryInfo(key, 0.0), ())
    ended = messages[-1].get("role") == "assistant"
    asked, choices = (messages[:-1], (Choice(0, messages[-1]),)) if ended else (messages, ())
    call = Call(key, key, 0.0, what, tuple(asked), choices, tuple(tools), untrainable=what)
    return Trajectory(TrajectoryInfo(key, 0.0), (call,))


def _with_answer(call: Call) -> tuple[JSON, ...]:
    answer = chosen_choice(call, ())
    return call.messages if answer is None else (*call.messages, answer.message)


def followed(trajectory: Trajectory, call: Call) -> tuple[JSON, ...]:
    """Return the messages after the answer to `call`, in the longest conversation that goes on from its prompt."""
    # Compared in canonical form, because clients echo messages with and without empty fields.
    prompt = [canonical(message) for message in call.messages]
    after: tuple[JSON, ...] = ()
    for other in trajectory.calls:
        messages = _with_answer(other)
        beyond = messages[len(prompt) + 1 :]
        if len(beyond) > len(after) and [canonical(message) for message in messages[: len(prompt)]] == prompt:
            after = beyond
    return after


def offered_tools(trajectories: Iterable[Trajectory]) -> tuple[JSON, ...]:
    """Return all tools that the app offered to the model in any call, each once, in the order of their first offer."""
    tools: dict[bytes, JSON] = {}
    for trajectory in trajectories:
        for call in trajectory.calls:
            for tool in call.tools:
                tools.setdefault(canonical(tool), tool)
    return tuple(tools.values())


def chosen_choice(call: Call, later: Iterable[Call]) -> Choice | None:
    """Return the answer to `call` that is in the prompt of a `later` call, else the first; `None` without answers."""
    # Of several answers the app used one, and its next prompt holds that one, even if the next call failed.
    if len(call.choices) > 1:
        depth = len(call.messages)
        prompt = [canonical(message) for message in call.messages]
        for other in later:
            if len(other.messages) > depth and [canonical(m) for m in other.messages[:depth]] == prompt:
                used = canonical(other.messages[depth])
                for choice in call.choices:
                    if canonical(choice.message) == used:
                        return choice
    return min(call.choices, key=lambda choice: choice.index, default=None)
