"""The states of a policy and the moves between them, as one table of data. The store enforces it.

::

    (new) -> candidate -> champion <-> retired
                       -> rejected

A policy is never changed: only where it stands changes. At most one policy is champion.
"""

from __future__ import annotations

from art_patch.errors import TransitionError
from art_patch.records import PolicyState

MOVES: dict[PolicyState | None, tuple[PolicyState, ...]] = {
    None: ("candidate", "champion"),  # straight to champion only for step 0, the base model
    "candidate": ("champion", "rejected"),
    "champion": ("retired",),
    "retired": ("champion",),
    "rejected": (),
}


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
    can = f"it may only become {' or '.join(allowed)}" if allowed else "it stays that way: train a new candidate"
    raise TransitionError(f"{policy} {where} and cannot become {after}; {can}")
