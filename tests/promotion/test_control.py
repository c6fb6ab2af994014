"""The control group's test: it goes on for as long as the champion serves, and finds harm that comes late."""

from __future__ import annotations

import random

import pytest

from art_patch.promotion import CanaryConfig, decide_control, evidence_of
from art_patch.promotion.bets import Bets
from art_patch.promotion.evidence import Observation
from art_patch.types import UPSTREAM_ARM, ArmCall, ArmTraffic, Score

DAY = 86_400.0
CHAMPION = "agent@1"
CONFIG = CanaryConfig()


def traffic(
    *,
    days: float,
    a_day: int,
    seed: int = 0,
    control: float = 0.2,
    worse_from: float = 99.0,
    is_whole: bool = True,
    **how,
) -> ArmTraffic:
    """Sessions of one call, right nine times in ten; from a day on, the champion's only seven."""
    rng, calls, scores = random.Random(seed), list[ArmCall](), list[Score]()
    for number in range(int(days * a_day)):
        at = (number + rng.random()) * DAY / a_day
        ours = rng.random() >= control
        policy = CHAMPION if ours else UPSTREAM_ARM
        is_bad = ours and at >= worse_from * DAY
        about = {"status": "ok", "fell_back": False} | (how if is_bad else {})
        key = f"t{number}"
        calls.append(
            ArmCall(
                f"c{number}",
                key,
                f"s{number}",
                None,
                at + 1,
                policy,
                duration_ms=500.0,
                ttft_ms=None,
                empty=False,
                **about,
            )
        )
        right = rng.random() < (0.7 if is_bad and not how else 0.9)
        scores.append(Score(f"r{number}", key, "reward", float(right), "code", at + 10))
    return ArmTraffic(tuple(calls), tuple(scores), ((0.0, 100 * (1 - control)),), is_whole)


def decided(known: ArmTraffic, now: float):
    evidence = evidence_of(known, challenger=CHAMPION, champion=UPSTREAM_ARM, state="canary", now=now)
    return decide_control(evidence, begin=0.0, config=CONFIG)


def test_harm_that_comes_after_days_is_found():
    known = traffic(days=9, a_day=400, worse_from=5)
    verdict = decided(known, 9 * DAY)
    assert verdict.action == "roll back"
    assert verdict.reason.startswith("its reward is worse: 0.")
    assert verdict.metrics["upstream"]["sessions"] + verdict.metrics["champion"]["sessions"] == 3_600


def test_what_fails_more_than_upstream_is_found_by_that():
    verdict = decided(traffic(days=4, a_day=400, worse_from=3, fell_back=True), 4 * DAY)
    assert verdict.action == "roll back"
    assert "share of sessions with a failed call is worse" in verdict.reason


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_equal_champion_stays(is_whole: bool):
    verdict = decided(traffic(days=6, a_day=300, is_whole=is_whole), 6 * DAY)
    assert (verdict.action, verdict.reason) == ("go on", "not proven worse than upstream")


def test_without_rewards_or_without_a_group_nothing_is_proven():
    known = traffic(days=2, a_day=300, worse_from=0)
    for part in (known._replace(scores=()), known._replace(calls=()), known._replace(calls=known.calls[:1])):
        assert decided(part, 2 * DAY).action == "go on"


def long_run(seed: int, *, is_whole: bool, since: float = 0.0) -> Bets:
    """Thirty days of equal policies of which the last part is known."""
    rng, bets = random.Random(seed), Bets(0.5)
    bets.spread(30 * DAY, begin=since * DAY, is_whole=is_whole)
    for number in range(1_500):
        at, ours, value = number * DAY / 50, rng.random() < 0.9, float(rng.random() < 0.6)
        if at >= since * DAY:
            bets.add(Observation(at, ours, value, 0.9), value)
    return bets


def test_equal_policies_alarm_at_most_as_often_as_alpha_says(record_property):
    alpha = 0.05
    wrong = sum(long_run(seed, is_whole=True).most_worse >= 1 / alpha for seed in range(150)) / 150
    record_property("figure", ["equal for 30 days: alarms", f"{wrong:.3f}", f"<= {alpha}"])
    assert wrong <= alpha


def test_a_part_of_a_test_stakes_no_more_than_the_whole_test_does_in_that_time():
    whole, part = Bets(0.5), Bets(0.5)
    whole.spread(30 * DAY, begin=0.0, is_whole=True)
    part.spread(30 * DAY, begin=20 * DAY, is_whole=False)
    for day in range(30):
        seen = Observation(day * DAY, False, 0.5, 0.5)
        for bets in (whole, part) if day >= 20 else (whole,):
            bets.add(seen, 0.5)
    # Nothing is won or lost with values that are all as expected, so the wealth is what was staked and what waits.
    assert whole.most_worse == pytest.approx(1.0)
    assert part.most_worse == pytest.approx(1.0)
    assert part.worse == pytest.approx(1.0)
