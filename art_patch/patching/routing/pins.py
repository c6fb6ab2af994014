"""Which policy answers a run of the agent: the one that it began with, so that nothing changes who answers midway.

A trajectory that two policies wrote teaches less than one of a single policy, and an agent that changes its mind midway
is an odd one. So a run stays with the policy of its first call while the engine serves that, which it does for two more
promotions. Going back is another matter: a policy that was rolled back is bad, and nobody stays with it.

While a canary is tested, a share of the sessions begins with it instead of with the champion: those that
a hash of their `sticky` key and the canary's name chooses, so every process chooses alike and every canary gets other
sessions. Runs that began with the champion before stay there. One that began with the canary stays with it, also when
it is promoted, and goes on with the champion at once when it is given up.

A run is its trajectory where the app names one, else the conversation, known by how it begins. A conversation's first
call, the one without an answer in it yet, always begins anew. Kept in this process alone: where another process goes on
with a run, the hash decides there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from art_patch.context import Identity
from art_patch.patching.routing.target import Target
from art_patch.recording import in_share

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
        self._left: set[str] = set()

    def policy(self, identity: Identity, body: Mapping[str, Any], target: Target) -> tuple[str, Key]:
        """Return whom to ask, and the key to `forget` it by."""
        key, begins = run_of(identity, body)
        pinned = None if begins else self._pins.get(key)
        if pinned is not None and self._may_stay(pinned, target):
            return pinned, key
        chosen = _choose(identity, body, target)
        if pinned != chosen:
            if len(self._pins) >= _KEPT:
                self._drop_oldest()
            self._pins[key] = chosen
        return chosen, key

    def turned(self, before: Target, after: Target) -> None:
        """The route has changed: nobody stays with a challenger that was given up, nor with a champion gone back from.

        Said here, once, because a later champion may have a higher step than both.
        """
        serve = (after.champion, after.canary)
        if before.canary is not None and before.canary not in serve:
            self._left.add(before.canary)
        champion = before.champion
        if champion is not None and champion not in serve and not _is_surpassed(champion, after.champion or ""):
            self._left.add(champion)
        self._left.difference_update(name for name in serve if name is not None)

    def forget(self, key: Key) -> None:
        """Let the run go on with the champion: its policy is no longer served."""
        self._pins.pop(key, None)

    def _may_stay(self, pinned: str, target: Target) -> bool:
        if pinned in (target.champion, target.canary):
            return True
        return pinned not in self._left and _is_surpassed(pinned, target.champion or "")

    def _drop_oldest(self) -> None:
        for key in list(self._pins)[: _KEPT // 10]:
            self._pins.pop(key, None)


def _choose(identity: Identity, body: Mapping[str, Any], target: Target) -> str:
    """The champion, or the canary for its share of the sessions."""
    canary = target.canary
    if canary is None:
        return target.champion or ""
    key = f"{canary}:{sticky_key(identity, body)}"
    chosen = in_share(key, target.challenger_percent / 100, "challenger")
    return canary if chosen else target.champion or ""


def _is_surpassed(pinned: str, champion: str) -> bool:
    """Whether the champion came after it; before it means that somebody went back."""
    name, _, step = pinned.rpartition("@")
    its_name, _, its_step = champion.rpartition("@")
    return name == its_name and step.isdigit() and its_step.isdigit() and int(step) < int(its_step)


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
