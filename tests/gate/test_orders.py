"""What the judge gives for standing first or last, taken out."""

from __future__ import annotations

import math
from itertools import count

import pytest

from art_patch.gate import BlindComparison, Turn, blind_answers, merge_orders
from art_patch.types import Choice
from tests.support.factory import make_call


def make_comparison(key: str) -> BlindComparison:
    turn, numbers = Turn(key, make_call()), count()
    ours, theirs = (
        [Choice(n, {"role": "assistant", "content": f"{who}{n}"}) for n in range(2)] for who in ("new", "old")
    )
    return (turn, *blind_answers(turn, ours, theirs, new_id=lambda: f"{key}-{next(numbers)}"))


def scores(comparison: BlindComparison, ours: float, theirs: float) -> dict[str, float]:
    _, group, of_candidate = comparison
    return {sibling.id: ours if sibling.id in of_candidate else theirs for sibling in group.trajectories}


def test_the_mean_of_both_orders_counts_and_flips_are_told():
    a, b = make_comparison("a"), make_comparison("b")
    first = scores(a, 0.9, 0.1) | scores(b, 0.8, 0.5)
    second = scores(a, 0.3, 0.5) | scores(b, 0.6, 0.5)
    judged = merge_orders([a, b], [first, second])
    assert [(key, pytest.approx(ours), pytest.approx(theirs)) for key, ours, theirs in judged.pairs] == [
        ("a", 0.6, 0.3),
        ("b", 0.7, 0.5),
    ]
    assert (judged.unscored, judged.order_disagreement) == ((), 0.5)
    assert merge_orders([a, b], [first]).order_disagreement is None


def test_a_judge_that_likes_what_stands_first_favours_nobody():
    comparisons = [make_comparison(f"s{n}") for n in range(10)]
    first = {k: v for n, c in enumerate(comparisons) for k, v in scores(c, 1.0 * (n % 2), 1.0 * (1 - n % 2)).items()}
    judged = merge_orders(comparisons, [first, {key: 1 - value for key, value in first.items()}])
    assert {(ours, theirs) for _, ours, theirs in judged.pairs} == {(0.5, 0.5)}
    assert judged.order_disagreement == 1.0


@pytest.mark.parametrize("missing", ["one answer", "an order", "nan"])
def test_a_turn_that_was_not_scored_whole_does_not_count(missing: str):
    a, b = make_comparison("a"), make_comparison("b")
    whole = scores(a, 0.9, 0.1) | scores(b, 0.9, 0.1)
    lacking = dict(whole)
    for key in list(scores(b, 0, 0))[: 4 if missing == "an order" else 1]:
        lacking[key] = math.nan
        if missing != "nan":
            del lacking[key]
    judged = merge_orders([a, b], [whole, lacking])
    assert ([key for key, *_ in judged.pairs], judged.unscored) == (["a"], ("b",))
    assert merge_orders([a], []).unscored == ("a",)
