"""Conversations as chains of content-addressed messages.

A message's node id is a 16-byte BLAKE2b over its parent's id and its own canonical JSON, so a conversation that
extends another shares all its nodes. The recorder stitches calls by it, the store keeps each message once.

Canonical: keys sorted, no white space, keys whose value is `None`, `""` or an empty list left out, because clients
echo an answer back with or without them (`"refusal": null`, `"content": ""` beside tool calls).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from art_patch.records import JSON

ROOT = b""
"""Parent of a conversation's first message."""

_EMPTY: tuple[Any, ...] = (None, "", [], ())


def canonical(message: JSON) -> bytes:
    """Return the message's canonical JSON, UTF-8; lone surrogates are kept as `\\udXXX` escapes."""
    kept = {key: value for key, value in message.items() if value not in _EMPTY}
    return json.dumps(kept, sort_keys=True, separators=(",", ":"), default=repr).encode("ascii")


def node_id(parent: bytes, body: bytes) -> bytes:
    """Return the 16-byte id of the node with this canonical `body` under `parent`."""
    return hashlib.blake2b(parent + b"\0" + body, digest_size=16).digest()


def chain(messages: Iterable[JSON], parent: bytes = ROOT) -> list[tuple[bytes, bytes, bytes]]:
    """Return `(node id, parent id, canonical body)` for each message in order."""
    nodes: list[tuple[bytes, bytes, bytes]] = []
    for message in messages:
        body = canonical(message)
        node = node_id(parent, body)
        nodes.append((node, parent, body))
        parent = node
    return nodes
