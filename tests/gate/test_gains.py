"""Whether a judge and the app's own signals agree, and what is said until that is known."""

from __future__ import annotations

import random

import pytest

from art_patch.gate import agreement, false_promotions, gains_in_words, normal_gain, paired_gain

RISES = normal_gain("the judge", [0.2, 0.0, 0.1, 0.1] * 30, "sessions")


def test_gains_have_limits_even_where_little_is_known():
    gain = paired_gain("the judge", [(f"s{n}", 0.5 + d, 0.5) for n, d in enumerate([0.1, 0.2, 0.3] * 4)])
    assert (gain.mean, gain.count) == (pytest.approx(0.2), 12)
    assert 0.1 < gain.low < 0.2 < gain.high < 0.3
    of_two_users = {f"s{n}": f"u{n % 2}" for n in range(12)}
    few = paired_gain("x", [(f"s{n}", 1.0, 0.5) for n in range(12)], user_of=of_two_users)
    assert (few.low, few.high) == (-1.0, 1.0)
    assert (normal_gain("x", [0.3], "sessions").low, normal_gain("x", [0.3], "sessions").high) == (-1.0, 1.0)
    assert RISES.words.startswith("the judge +0.100 (+0.08")


def test_a_disagreement_is_named_when_it_is_proven_and_else_what_it_takes():
    falls = normal_gain("people's feedback", [-1.0, 0.5, 0.0, 0.1] * 30, "sessions with feedback")
    assert agreement(RISES, falls) == "the judge and people's feedback disagree: the policy may please the judge alone"
    few = normal_gain("people's feedback", [-0.6, 0.4], "sessions with feedback")
    words = agreement(RISES, few)
    assert words is not None and words.startswith("a loss in people's feedback as large as the gain in the judge takes")
    assert words.endswith("sessions with feedback to show")
    assert agreement(RISES, RISES) is None
    sinks = normal_gain("the judge", [-0.1, -0.2] * 9, "sessions")
    assert agreement(sinks, falls) is None
    nothing = normal_gain("the judge", [0.1, 0.2, -0.3] * 3, "sessions")  # the sum of these is 1e-17, not 0
    assert nothing.mean > 0
    assert agreement(nothing, few) is None
    assert gains_in_words(RISES, []) == ""
    assert gains_in_words(RISES, [falls]).startswith("gains: the judge +0.100 (")


def test_the_number_that_is_said_to_be_needed_is_enough():
    rng = random.Random(1)
    few = normal_gain("people's feedback", [-0.6, 0.4] * 20, "sessions")
    words = agreement(RISES, few)
    assert words is not None
    needed = int(words.split(" takes about ")[1].split()[0].replace(",", ""))
    named = 0
    for _ in range(200):
        enough = normal_gain("people's feedback", [rng.gauss(-0.1, 0.5) for _ in range(needed)], "sessions")
        named += "disagree" in (agreement(RISES, enough) or "")
    assert named >= 170  # of 190 expected


def test_how_many_gates_a_year_promote_by_chance():
    assert false_promotions([], 0.95) is None
    assert false_promotions([1.0, 2.0], 0.95) is None
    runs, wrong = false_promotions([86_400.0 * day for day in range(11)], 0.95) or (0, 0)
    assert (runs, wrong) == (pytest.approx(365), pytest.approx(18.25))
