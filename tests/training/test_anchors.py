"""Which of a run's turns get the credit for its reward."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_patch.training import Anchors, Example, Row


def row(*parts: tuple[tuple[int, ...], tuple[int, ...]]) -> Row:
    """A row of turns, each with what comes before the answer, and the answer."""
    ids = tuple(token for prompt, answer in parts for token in (*prompt, *answer))
    sampled = tuple(is_ for prompt, answer in parts for is_ in (*[False] * len(prompt), *[True] * len(answer)))
    return Row(ids, sampled, (0.0,) * len(ids), (1.0,) * len(ids))


def token_advantages(siblings: list[Example], weight: float) -> list[list[float]]:
    """Of each sibling, the advantages of its sampled tokens."""
    anchors = Anchors(siblings, weight)
    return [list(anchors.of_tokens(each).token_advantages or (each.advantage,) * each.sampled) for each in siblings]


def test_credit_goes_to_the_turn_at_which_siblings_in_the_same_state_parted():
    # All begin alike; two answered 5 and were told 8, two answered 6 and were told 9. Only that turn decided.
    good = [row(((1, 2), (5,)), ((8,), (answer,))) for answer in (3, 4)]
    bad = [row(((1, 2), (6,)), ((9,), (answer,))) for answer in (3, 4)]
    siblings = [*(Example((each,), 1.0) for each in good), *(Example((each,), -1.0) for each in bad)]
    for weight, later in ((0.0, 1.0), (1.0, 0.5), (3.0, 0.25)):
        assert token_advantages(siblings, weight) == [[1.0, later], [1.0, later], [-1.0, -later], [-1.0, -later]]


def test_the_same_state_is_found_in_rows_that_begin_anew_at_each_turn():
    """An agent that is told the state, and no history."""
    runs = [
        Example((row(((1,), (5,))), row(((7,), (3, 3)))), 1.0),
        Example((row(((1,), (6,))), row(((7,), (4,)))), -2.0),
        Example((row(((1,), (6,))), row(((8,), (4,)))), 1.0),
    ]
    assert token_advantages(runs, 1.0) == [[1.0, 1.25, 1.25], [-2.0, -1.75], [1.0, 0.5]]


def test_a_run_that_comes_back_to_a_state_counts_once_there():
    runs = [Example((row(((1,), (5,))), row(((1,), (6,)))), 1.0), Example((row(((1,), (7,))),), -1.0)]
    assert token_advantages(runs, 1.0) == [[1.0, 1.0], [-1.0]]


def test_an_answer_that_continues_another_keeps_its_runs_advantage():
    # As with `continue_final_message`: in the row, both are one run of sampled tokens.
    runs = [Example((row(((1, 2), (3, 4, 5))),), 1.0), Example((row(((1, 2), (6,))),), -1.0)]
    anchors = Anchors(runs, 0.5)
    assert anchors.of_turn(1.0, (1, 2)) == 1.0
    assert anchors.of_turn(1.0, (1, 2, 3, 4)) == pytest.approx(1 / 1.5)


def test_an_answer_that_is_only_context_parts_states_too():
    one, other = (Row((1, token, 2, 3), (False, False, False, True), (0.0,) * 4, (1.0,) * 4) for token in (8, 9))
    found = token_advantages([Example((one,), 1.0), Example((other,), -1.0)], 1.0)
    assert found == [[0.5], [-0.5]]


turns = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=2), st.lists(st.integers(0, 1), min_size=1, max_size=2)),
    min_size=1,
    max_size=4,
)
siblings = st.lists(st.tuples(st.lists(turns, min_size=1, max_size=3), st.floats(-2, 2)), min_size=1, max_size=5)


@given(siblings, st.floats(0, 10))
def test_every_sampled_token_has_one_and_a_states_anchors_balance(runs, weight: float):
    examples = [
        Example(tuple(row(*((tuple(prompt), tuple(answer)) for prompt, answer in its)) for its in rows), advantage)
        for rows, advantage in runs
    ]
    found = token_advantages(examples, weight)
    assert [len(each) for each in found] == [each.sampled for each in examples]
    assert all(np.isfinite(each).all() for each in found)
    for each, plain in zip(examples, token_advantages(examples, 0.0), strict=True):
        assert plain == [each.advantage] * each.sampled
    # A plain reckoning: the mean over the other siblings that had these very ids before an answer.
    prompts = [_prompts(each) for each in examples]
    for each, its, own in zip(examples, prompts, found, strict=True):
        wanted: list[float] = []
        for prompt, tokens in its:
            those = [other.advantage for other, theirs in zip(examples, prompts, strict=True) if prompt in dict(theirs)]
            anchor = each.advantage - sum(those) / len(those)
            wanted += [(each.advantage + weight * anchor) / (1 + weight)] * tokens
            assert Anchors(examples, weight).of_turn(each.advantage, prompt) == pytest.approx(wanted[-1])
        assert own == pytest.approx(wanted)


def _prompts(example: Example) -> list[tuple[tuple[int, ...], int]]:
    found: list[tuple[tuple[int, ...], int]] = []
    for each in example.rows:
        starts = [t for t, is_ in enumerate(each.sampled_T) if is_ and not each.sampled_T[t - 1]]
        for start in starts:
            stop = next((t for t in range(start, len(each.ids_T)) if not each.sampled_T[t]), len(each.ids_T))
            found.append((each.ids_T[:start], stop - start))
    return found
