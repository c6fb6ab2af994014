"""Computes the id of each message in a conversation from the message's content and the id of the message before it.

A message in its place is called a node. Its id is a 16-byte BLAKE2b hash of its parent's id and of its own canonical
JSON. So if one conversation continues another, their common messages have the same ids, and the store writes each
message once. The recorder finds a call's trajectory alike, with a hash of fewer fields (`recording.converting`).
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

from pydantic_core import PydanticSerializationError, to_json

from art_patch.types import JSON

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
