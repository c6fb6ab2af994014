"""Which policy a run of the agent began with, so that a promotion midway does not change who answers it.

A trajectory that two policies wrote teaches less than one of a single policy, and an agent that changes its mind midway
is an odd one. So a run stays with the policy of its first call while the engine serves that, which it does for two more
promotions. Going back is another matter: a policy that was rolled back is bad, and nobody stays with it.

A run is its trajectory where the app names one, else the conversation, known by how it begins. A conversation's first
call, the one without an answer in it yet, always asks the champion. Kept in this process alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from art_patch.context import Identity

_KEPT = 10_000

Key = str | int


def run_of(identity: Identity, body: Mapping[str, Any]) -> tuple[Key, bool]:
    """Return the key of the call's run, and whether this call begins it as far as its words tell."""
    if identity.trajectory is not None:
        return identity.trajectory.id, False
    messages: Any = body.get("messages")
    opening: list[str] = []
    for message in cast(list[Any], messages) if isinstance(messages, list) else ():
        fields = cast(Mapping[str, Any], message) if isinstance(message, Mapping) else {}
        if fields.get("role") == "assistant":
            return hash(tuple(opening)), False
        opening.append(str(fields.get("content")))
    return hash(tuple(opening)), True


class Pins:
    """Policies by run; the runs that were pinned first are forgotten first."""

    def __init__(self) -> None:
        """Start with none."""
        self._pins: dict[Key, str] = {}

    def policy(self, identity: Identity, body: Mapping[str, Any], champion: str) -> tuple[str, Key]:
        """Return whom to ask, and the key to `forget` it by."""
        key, begins = run_of(identity, body)
        pinned = None if begins else self._pins.get(key)
        if pinned is not None and pinned != champion and _is_surpassed(pinned, champion):
            return pinned, key
        if pinned != champion:
            if len(self._pins) >= _KEPT:
                self._drop_oldest()
            self._pins[key] = champion
        return champion, key

    def forget(self, key: Key) -> None:
        """Let the run go on with the champion: its policy is no longer served."""
        self._pins.pop(key, None)

    def _drop_oldest(self) -> None:
        for key in list(self._pins)[: _KEPT // 10]:
            self._pins.pop(key, None)


def _is_surpassed(pinned: str, champion: str) -> bool:
    """Whether the champion came after it; before it means that somebody went back."""
    name, _, step = pinned.rpartition("@")
    its_name, _, its_step = champion.rpartition("@")
    return name == its_name and step.isdigit() and its_step.isdigit() and int(step) < int(its_step)
