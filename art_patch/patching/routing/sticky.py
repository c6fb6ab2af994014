"""What stays the same through a conversation, so that a share of the traffic never changes sides midway.

The session if the app names one, else the trajectory, else how the conversation begins: its messages up to the first
answer, which an agent sends again with each of its calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from art_patch.context import Identity


def sticky_key(identity: Identity, body: Mapping[str, Any]) -> str:
    """Return the key by whose hash a call is chosen."""
    info = identity.trajectory
    if info is not None:
        return info.session_id or info.id
    said: Any = body.get("messages") or body.get("input") or body.get("prompt")
    opening: list[Any] = [body.get("instructions")]
    for message in cast(list[Any], said) if isinstance(said, list) else [said]:
        if isinstance(message, Mapping) and cast(Mapping[str, Any], message).get("role") not in _BEFORE_THE_ANSWER:
            break
        opening.append(message)
    return json.dumps(opening, default=repr)


_BEFORE_THE_ANSWER = ("system", "developer", "user")
