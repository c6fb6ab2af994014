"""Which scenario a trajectory belongs to, and whether that scenario is held out for the gate."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from typing import Any

from art_patch.records import JSON, Trajectory

# Things that differ between two asks of the same task. Short numbers stay: they usually are the task.
_VOLATILE = (
    (re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"), "<uuid>"),
    (re.compile(r"\b\d{4}-\d{2}-\d{2}(?:[t ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:z|[+-]\d{2}:?\d{2})?)?\b"), "<time>"),
    (re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b"), "<hex>"),
    (re.compile(r"\b\d{7,}\b"), "<number>"),
)


def normalise(text: str) -> str:
    """Return the text in one spelling: NFKC, lower case, single spaces, uuids, times and long numbers masked."""
    text = unicodedata.normalize("NFKC", text).casefold()
    for pattern, mask in _VOLATILE:
        text = pattern.sub(mask, text)
    return " ".join(text.split())


def scenario_of(trajectory: Trajectory) -> tuple[str, str] | None:
    """Return `(scenario key, how it was found)`; `None` for a trajectory without calls."""
    info = trajectory.info
    if info.group_key is not None:
        return f"group:{info.group_key}", "group_key"
    if info.scenario_key is not None:
        return f"scenario:{info.scenario_key}", "scenario_key"
    if not trajectory.calls:
        return None
    first = trajectory.calls[0]
    opening: list[Any] = []
    for message in first.messages:
        opening.append([message.get("role"), _text(message)])
        if message.get("role") == "user":
            break
    tools = sorted(json.dumps(tool, sort_keys=True, default=repr) for tool in first.tools)
    body = json.dumps([opening, tools], separators=(",", ":"))
    return f"task:{hashlib.blake2b(body.encode(), digest_size=16).hexdigest()}", "same_task"


def _text(message: JSON) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return normalise(content)
    return normalise(json.dumps(content, sort_keys=True, default=repr))


def is_held_out(scenario_key: str, share: float) -> bool:
    """Whether the scenario is kept for the gate. Depends on the key alone, so it never changes sides.

    Args:
        scenario_key: as `scenario_of` gives it.
        share: part of all scenarios to hold out, 0..1.
    """
    digest = hashlib.blake2b(scenario_key.encode("utf-8", "surrogatepass"), digest_size=8, person=b"held-out").digest()
    return int.from_bytes(digest) < share * 2**64
