"""The table of moves: what it allows, what it says when it does not, and that nothing can leave it."""

from __future__ import annotations

from typing import get_args

import pytest

from art_patch.errors import TransitionError
from art_patch.types import CHALLENGERS, MOVES, PolicyState, check_move

STATES: tuple[PolicyState, ...] = get_args(PolicyState)


def test_every_state_is_in_the_table_and_can_be_reached():
    assert set(MOVES) == {None, *STATES}
    assert {after for allowed in MOVES.values() for after in allowed} == set(STATES)
    assert set(CHALLENGERS) < set(STATES)


@pytest.mark.parametrize("before", [None, *STATES])
@pytest.mark.parametrize("after", STATES)
def test_what_is_not_in_the_table_is_refused(before: PolicyState | None, after: PolicyState):
    if after in MOVES[before]:
        check_move("agent@1", before, after)
        return
    with pytest.raises(TransitionError, match="agent@1 is"):
        check_move("agent@1", before, after)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("shadow", "learner", "agent@1 is shadow and cannot become learner; it may only become"),
        (
            "champion",
            "rejected",
            "only become retired or learner, which `art-patch rollback` does, or the promotion of another",
        ),
        ("shadow", "shadow", "already shadow"),
        ("rejected", "canary", "it stays that way: train a new candidate"),
        (None, "shadow", "agent@1 is new"),
    ],
)
def test_a_refusal_names_what_is_allowed(before: PolicyState | None, after: PolicyState, words: str):
    with pytest.raises(TransitionError, match=words):
        check_move("agent@1", before, after)
