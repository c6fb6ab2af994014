"""The states of a policy and the moves between them, as one table of data. The store enforces it.

::

    (new) -> candidate -> shadow -> canary -> champion <-> retired -> rejected
                 |           |       |  ^
                 |           |       +--+ another share of the sessions
                 +-----------+-------+--> rejected

The steps before `champion` may be skipped. The policy itself never changes; only its state does. At most one policy is
champion, and at most one is a challenger, which is tested on the app's traffic beside the champion. A move from
`canary` to `canary` changes the share of the sessions; like every move it has an author, a time and a reason.
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
    """Check that the table allows the move of a policy from state `before` to `after`.

    Raises:
        TransitionError: if not. The message names the allowed moves.
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
