"""Looks after every session do not inflate errors; large differences are found at once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_patch.promotion.bets import FRACTIONS, Bets
from art_patch.promotion.evidence import Observation


def bet(challenger: float, champion: float, *, seed: int, share: float, n: int, **how: float) -> Bets:
    """Values 0 and 1 with these chances; the challenger answers a share of the sessions."""
    rng, bets = random.Random(seed), Bets(0.5, **how)
    for at in range(n):
        ours = rng.random() < share
        value = float(rng.random() < (challenger if ours else champion))
        bets.add(Observation(float(at), ours, value, share), value)
    return bets


@pytest.mark.parametrize(("share", "alpha"), [(0.05, 0.02), (0.2, 0.05), (0.5, 0.05)])
def test_equal_policies_are_hardly_ever_told_apart_at_any_time(share: float, alpha: float, record_property):
    bets = [bet(0.5, 0.5, seed=seed, share=share, n=1_500) for seed in range(150)]
    for way in ("most_better", "most_worse"):
        wrong = sum(getattr(one, way) >= 1 / alpha for one in bets) / len(bets)
        record_property("figure", [f"equal, share {share:.0%}: {way} any time", f"{wrong:.3f}", f"<= {alpha}"])
        assert wrong <= alpha


def test_a_policy_within_the_tolerance_is_not_called_worse_and_one_within_the_margin_not_better(record_property):
    worse = [bet(0.45, 0.5, seed=seed, share=0.2, n=1_500, tolerance=0.05).most_worse for seed in range(100)]
    better = [bet(0.55, 0.5, seed=seed, share=0.2, n=1_500, margin=0.05).most_better for seed in range(100)]
    for name, most in (("tolerance", worse), ("margin", better)):
        wrong = sum(one >= 20 for one in most) / 100
        record_property("figure", [f"just at the {name}: said", f"{wrong:.2f}", "<= 0.05"])
        assert wrong <= 0.05


def test_drift_and_clusters_that_both_share_prove_nothing(record_property):
    """Everything fails for a while, for both, again and again."""
    wrong = [0, 0]
    for seed in range(200):
        rng, bets = random.Random(seed), Bets(0.95)
        for at in range(1_000):
            ours, value = rng.random() < 0.2, float(at % 400 >= 100)
            bets.add(Observation(float(at), ours, value, 0.2), value)
        wrong = [wrong[0] + (bets.most_better >= 20), wrong[1] + (bets.most_worse >= 20)]
    record_property("figure", ["waves that befall both: better, worse", f"{wrong[0] / 200}, {wrong[1] / 200}", "0.05"])
    assert max(wrong) / 200 <= 0.05


def test_a_policy_that_fails_at_once_is_found_within_few_sessions():
    bets = Bets(0.95)
    for at in range(60):
        bets.add(Observation(float(at), False, 1.0, 0.05), 1.0)
    for session in range(1, 9):
        bets.add(Observation(100.0 + session, True, 0.0, 0.05), 0.0)
        if bets.most_worse >= 1 / 0.006:
            break
    assert session <= 4


def test_a_better_policy_is_found_and_how_many_sessions_that_takes_is_foretold():
    bets = bet(0.7, 0.5, seed=0, share=0.5, n=800)
    assert bets.most_better >= 40
    assert bets.difference == pytest.approx(0.2, abs=3 * bets.error)
    needed = bet(0.6, 0.5, seed=1, share=0.5, n=400).sessions_needed(0.025, 0.1)
    assert 500 < needed < 5_000


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1)), max_size=60), st.sampled_from([0.01, 0.2, 0.9]))
def test_no_wealth_is_ever_negative_and_equal_values_earn_nothing(seen: list[tuple[bool, float]], share: float):
    bets, equal = Bets(0.5), Bets(0.5)
    for at, (ours, value) in enumerate(seen):
        bets.add(Observation(float(at), ours, value, share), value)
        equal.add(Observation(float(at), ours, 0.5, share), 0.5)
        assert bets.worse >= 0
        assert bets.most_better >= 1
    assert (equal.most_better, equal.most_worse) == (pytest.approx(1), pytest.approx(1))


@given(st.floats(0, 1), st.floats(0.02, 0.98), st.floats(0, 1))
def test_if_both_are_equal_no_bet_gains_on_average(value: float, share: float, guess: float):
    """Over the chance alone that assigns the session, for one session with any value and any guess."""
    gain = {}
    for ours in (True, False):
        bets = Bets(0.5)
        bets.add(Observation(0.0, ours, value, share, guess), value)
        gain[ours] = (sum(bets._better), sum(bets._worse))
    for better_or_worse in (0, 1):
        mean = share * gain[True][better_or_worse] + (1 - share) * gain[False][better_or_worse]
        assert mean == pytest.approx(1, abs=1e-9)


def test_pairs_are_bet_on_by_their_difference():
    bets = Bets(0.5)
    for at in range(40):
        bets.add(Observation(float(at), True, 0.0, champions=1.0), 0.0, 1.0)
    assert bets.most_worse >= 1 / 0.006
    assert bets.most_better == pytest.approx(1)
    assert len(FRACTIONS) == 12
    assert FRACTIONS[0] == pytest.approx(0.004)
    assert FRACTIONS[-1] == pytest.approx(0.95)


def test_a_session_that_could_not_have_been_the_others_compares_nothing():
    bets = Bets(0.5)
    for share in (0.0, 1.0):
        bets.add(Observation(0.0, True, 0.0, share), 0.0)
    assert (bets.sessions, bets.most_worse, bets.difference) == (0, pytest.approx(1), 0.0)
