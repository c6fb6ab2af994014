"""Chains of content-addressed messages.

A node id is a 16-byte BLAKE2b of the parent's id and of the message's own canonical JSON, so a conversation that
extends another one shares its nodes. The recorder finds trajectories by it, and the store keeps each message once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
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
    """A message in its place in a conversation.

    Attributes:
        node: id of the message in this place.
        parent: id of the message before it; `ROOT` for the first one.
        body: the message as it came, as JSON.
    """

    node: bytes
    parent: bytes
    body: bytes


def canonical(message: JSON) -> bytes:
    """Return the message's canonical JSON as UTF-8: sorted keys, no white space, no empty values.

    Clients echo an answer with or without empty values (`"refusal": null`, `"content": ""` beside tool calls).
    """
    kept = {key: value for key, value in message.items() if value not in _EMPTY}
    return _canonical(kept).encode("utf-8", "surrogatepass")


def verbatim(value: Any) -> bytes:
    """Return JSON as UTF-8 with the keys in their order. `json.loads` reads lone surrogates back."""
    return _verbatim(value).encode("utf-8", "surrogatepass")


def node_id(parent: bytes, message: JSON) -> bytes:
    """Return the 16-byte id of the message under `parent`."""
    return _id(parent, canonical(message))


def chain(messages: Iterable[JSON], parent: bytes = ROOT) -> Iterator[Link]:
    """Yield the messages as links, in order."""
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
