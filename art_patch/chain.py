"""Conversations as chains of content-addressed messages.

A message's node id is a 16-byte BLAKE2b over its parent's id and its own canonical JSON, so a conversation that
extends another shares all its nodes. The recorder stitches calls by it, the store keeps each message once.

Canonical: keys sorted, no white space, keys whose value is `None`, `""` or empty left out, because clients echo an
answer back with or without them (`"refusal": null`, `"content": ""` beside tool calls). Canonical JSON only makes ids:
what is kept is the message as it came, since a chat template renders keys in the order it finds them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from art_patch.records import JSON

ROOT = b""
"""Parent of a conversation's first message."""

# Made once: `json.dumps` makes an encoder for each call that has arguments.
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=repr).encode
_verbatim = json.JSONEncoder(separators=(",", ":"), default=repr).encode

_EMPTY: tuple[Any, ...] = (None, "", [], ())


def canonical(message: JSON) -> bytes:
    r"""Return the message's canonical JSON, UTF-8; lone surrogates are kept as `\udXXX` escapes."""
    kept = {key: value for key, value in message.items() if value not in _EMPTY}
    return _canonical(kept).encode("ascii")


def verbatim(value: Any) -> bytes:
    r"""Return JSON as it came, keys in their order; lone surrogates are kept as `\udXXX` escapes."""
    return _verbatim(value).encode("ascii")


def node_id(parent: bytes, message: JSON) -> bytes:
    """Return the 16-byte id of the message under `parent`."""
    return hashlib.blake2b(parent + b"\0" + canonical(message), digest_size=16).digest()


def chain(messages: Iterable[JSON], parent: bytes = ROOT) -> list[tuple[bytes, bytes, JSON]]:
    """Return `(node id, parent id, message)` for each message in order."""
    nodes: list[tuple[bytes, bytes, JSON]] = []
    for message in messages:
        node = node_id(parent, message)
        nodes.append((node, parent, message))
        parent = node
    return nodes
