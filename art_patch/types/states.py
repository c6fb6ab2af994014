"""The states of a policy and the allowed changes between them (moves), as one table that the store enforces.

::

    (new) -> candidate -> shadow -> canary -> champion <-> retired -> rejected
                 |           |       |  ^
                 |           |       +--+ another share of the sessions
                 +-----------+-------+--> rejected

The states `shadow` and `canary` may be skipped. A policy's weights never change; only its state does. At most one
policy is champion, and at most one is under test on the app's traffic, in state `shadow` or `canary`. A change from
`canary` to `canary` sets another share of the sessions. Every change is recorded with its author, time and reason.
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
    "retired": ("champion", "rejected"),  # to champion: a rollback
    "rejected": (),
}

CHALLENGERS: tuple[PolicyState, ...] = ("shadow", "canary")
"""States of a policy that is tested on the app's traffic."""


def check_move(policy: str, before: PolicyState | None, after: PolicyState) -> None:
    """Check that a policy may change from state `before` (`None`: it is new) to `after`.

    Raises:
        TransitionError: if it may not. The message names the states that it may change to.
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
