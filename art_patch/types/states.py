"""The states of a policy and the moves between them, as one table of data. The store enforces it.

::

    (new) -> candidate -> shadow -> canary -> champion <-> retired -> rejected
                 |           |       |  ^
                 |           |       +--+ another share of the sessions
                 +-----------+-------+--> rejected

Each step before the champion may be left out. A policy is never changed: only where it stands changes. At most one
policy is champion, and at most one is a challenger: tested on the app's traffic, beside the champion. A canary may
become a canary of another share: that is decided of it as any move is, by somebody, at a time and for a reason.
"""

from __future__ import annotations

from art_patch.errors import TransitionError
from art_patch.types.app_records import PolicyState

MOVES: dict[PolicyState | None, tuple[PolicyState, ...]] = {
    None: ("candidate", "champion"),  # straight to champion only for step 0, the base model
    "candidate": ("shadow", "canary", "champion", "rejected"),
    "shadow": ("canary", "champion", "rejected"),
    "canary": ("canary", "champion", "rejected"),  # to itself: with another share of the sessions
    "champion": ("retired",),
    "retired": ("champion", "rejected"),
    "rejected": (),
}

CHALLENGERS: tuple[PolicyState, ...] = ("shadow", "canary")
"""States of a policy that is tested on the app's traffic."""


def check_move(policy: str, before: PolicyState | None, after: PolicyState) -> None:
    """Pass if the move is in the table.

    Raises:
        TransitionError: naming the moves that are allowed.
    """
    allowed = MOVES[before]
    if after in allowed:
        return
    if before == after:
        raise TransitionError(f"{policy} is already {after}; nothing to do")
    where = f"is {before}" if before else "is new"
    can = f"it may only become {_either(allowed)}" if allowed else "it stays that way: train a new candidate"
    if before == "champion":
        can += ", which `art-patch rollback` does, or the promotion of another policy"
    raise TransitionError(f"{policy} {where} and cannot become {after}; {can}")


def _either(states: tuple[PolicyState, ...]) -> str:
    *most, last = states
    return f"{', '.join(most)} or {last}" if most else last
