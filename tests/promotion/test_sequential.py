"""What becomes of a challenger, for each kind of evidence."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_patch.errors import ConfigError
from art_patch.promotion import CanaryConfig, decide, evidence_of
from art_patch.promotion.bets import SIGNALS
from art_patch.promotion.evidence import Arm, Evidence, Observation
from art_patch.types import ArmCall, ArmTraffic

NEW, OLD = "agent@1", "agent@0"
CONFIG = CanaryConfig()
ARMS = (Arm(100, 40, 0), Arm(1_000, 400, 0))


def sessions(ours: float, theirs: float, *, n: int = 300, share: float = 0.2, seed: int = 0) -> list[Observation]:
    """Sessions of which each policy's have always the same value."""
    rng = random.Random(seed)
    whose = [rng.random() < share for _ in range(n)]
    return [Observation(float(at), one, ours if one else theirs, share) for at, one in enumerate(whose)]


def coins(ours: float, theirs: float, *, n: int = 300, share: float = 0.2, seed: int = 0) -> list[Observation]:
    """Sessions with the value 1 at these chances, else 0."""
    rng = random.Random(f"values {seed}")
    every = sessions(ours, theirs, n=n, share=share, seed=seed)
    return [one._replace(value=float(rng.random() < one.value)) for one in every]


def said(
    arms: tuple[Arm, Arm] = ARMS, *, state="canary", hours: float = 1.0, config: CanaryConfig = CONFIG,
    heard: dict | None = None, with_silence: dict | None = None, percents: tuple[float, ...] = (5.0,),
    **observations,
):  # fmt: skip
    evidence = Evidence(*arms, observations, heard or {}, with_silence or {}, percents)
    return decide(evidence, state=state, hours=hours, config=config)


WORSE = {
    "reward": (0.2, 0.8), "feedback": (0.0, 1.0), "failed": (1.0, 0.0), "empty": (1.0, 0.0),
    "latency_ms": (400.0, 100.0), "ttft_ms": (90.0, 30.0),
}  # fmt: skip


def test_there_is_a_case_for_every_signal_and_their_shares_are_one():
    assert {signal.name for signal in SIGNALS} == set(WORSE)
    assert sum(signal.alpha_share for signal in SIGNALS) == pytest.approx(1)


@pytest.mark.parametrize("name", WORSE)
def test_what_is_proven_worse_on_any_signal_is_rolled_back(name: str):
    verdict = said(**{name: sessions(*WORSE[name])})
    assert verdict.action == "roll back"
    metrics = verdict.metrics["signals"][name]
    assert metrics["says"] == "worse"
    assert metrics["worse"] >= metrics["worse_needed"]
    assert f"in {metrics['compared']} sessions" in verdict.reason


@pytest.mark.parametrize("name", WORSE)
def test_the_other_way_round_only_rewards_and_feedback_promote(name: str):
    verdict = said(**{name: sessions(*WORSE[name][::-1])})
    assert verdict.action == ("promote" if name in ("reward", "feedback") else "go on")


def test_a_policy_that_fails_is_stopped_before_any_session_has_ended():
    """A second of traffic: failures are known, and no success is yet."""
    calls = [
        ArmCall(
            f"{n}", f"t{n}", f"s{n}", None, 100 + n / 50, NEW if n % 5 == 0 else OLD, "ok", n % 5 == 0, 9, None, False
        )
        for n in range(50)
    ]
    known = ArmTraffic(tuple(calls), (), ((0.0, 20.0),))
    found = evidence_of(known, challenger=NEW, champion=OLD, state="canary", now=101.0)
    assert decide(found, state="canary", hours=0.1, config=CONFIG).action == "roll back"


def test_better_answers_do_not_excuse_failures():
    verdict = said(feedback=sessions(1.0, 0.0), failed=sessions(1.0, 0.0))
    assert verdict.action == "roll back"
    assert verdict.reason.startswith("its share of sessions with a failed call is worse: 1.000 against 0.000 in ")


def test_equally_slow_sessions_with_a_long_tail_are_not_called_slower():
    for seed in range(20):
        rng = random.Random(seed)
        slow = [one._replace(value=rng.lognormvariate(5, 2)) for one in sessions(0, 0, n=600, seed=seed)]
        assert said(latency_ms=slow).action == "go on"
        a_little = [one._replace(value=one.value * (1.4 if one.challenger else 1)) for one in slow]
        assert said(latency_ms=a_little).action == "go on"


def test_equal_arms_go_on_and_end_without_an_answer_which_is_no_promotion():
    equal = coins(0.5, 0.5)
    assert said(reward=equal, failed=sessions(0.0, 0.0)).action == "go on"
    verdict = said(reward=equal, hours=168.0)
    assert verdict.action == "inconclusive"
    assert verdict.reason.startswith("no answer within 168 hours: neither worse nor better is proven yet")
    assert said(reward=equal, hours=math.nan).action == "inconclusive"


def test_a_test_that_this_traffic_cannot_decide_any_more_ends_after_two_days():
    equal = coins(0.5, 0.5, n=6_000, share=0.5)
    assert said(reward=equal, hours=47.0).action == "go on"
    verdict = said((Arm(9, 3_000, 0), Arm(9, 3_000, 0)), reward=equal, hours=160.0)
    assert (verdict.action, verdict.reason[:26]) == ("inconclusive", "this traffic cannot decide")
    assert said(hours=100.0).action == "go on"  # nobody has said anything yet, and a judge still may


def test_what_is_proven_better_is_not_given_up_while_it_waits_for_sessions():
    better = coins(1.0, 0.0, n=200)
    assert said((Arm(9, 19, 0), Arm(9, 181, 0)), feedback=better, hours=30.0).action == "go on"


def test_a_test_with_more_calls_than_can_be_read_ends():
    evidence = Evidence(*ARMS, {"reward": coins(0.5, 0.5)}, is_whole=False)
    verdict = decide(evidence, state="canary", hours=1.0, config=CONFIG)
    assert (verdict.action, verdict.reason[:50]) == (
        "inconclusive",
        "no answer in as many calls as one test may have: n",
    )
    better = Evidence(*ARMS, {"reward": sessions(1.0, 0.0)}, is_whole=False)
    assert decide(better, state="canary", hours=1.0, config=CONFIG).action == "promote"


def test_how_much_more_is_needed_is_said():
    verdict = said(reward=coins(0.62, 0.5, n=400, share=0.5, seed=0), hours=24.0)
    assert verdict.action == "go on"
    assert verdict.metrics["sessions_needed"] > 0
    assert verdict.metrics["sessions_a_day"] == 440.0
    assert "if it goes on like this, about " in verdict.reason
    assert verdict.reason.endswith(" days")


def test_an_estimate_of_no_more_sessions_is_not_told_where_a_proof_is_missing():
    verdict = said((Arm(100, 45, 0), Arm(100, 45, 0)), reward=coins(0.95, 0.6, n=90, share=0.5, seed=1))
    assert (verdict.action, verdict.metrics["sessions_needed"]) == ("go on", 0.0)
    assert verdict.reason == "neither worse nor better is proven yet"


def test_a_proof_counts_at_the_last_moment_too():
    assert said(feedback=sessions(0.0, 1.0), hours=169.0).action == "roll back"
    assert said(feedback=sessions(1.0, 0.0), hours=169.0).action == "promote"


def test_with_too_few_sessions_nothing_is_promoted():
    better = sessions(1.0, 0.0)
    verdict = said((Arm(50, 19, 0), Arm(500, 200, 0)), feedback=better)
    assert (verdict.action, verdict.reason) == (
        "go on",
        "19 sessions of its own, 200 of the champion's; 20 of each are needed",
    )
    assert said((Arm(50, 20, 0), Arm(500, 200, 0)), feedback=better).action == "promote"


def test_a_shadow_is_rolled_back_but_never_promoted():
    pairs = [Observation(float(at), True, 1.0, champions=0.0) for at in range(40)]
    assert said(state="shadow", feedback=pairs).action == "go on"
    assert said(state="shadow", feedback=pairs, hours=169.0).action == "inconclusive"
    assert said(state="shadow", failed=pairs).action == "roll back"
    assert said(state="shadow", feedback=pairs).percent is None


def test_without_a_champion_there_is_nothing_to_compare():
    alone = (Arm(100, 40, 0), Arm())
    assert "nothing to compare" in said(alone).reason
    assert (said(alone).action, said(alone, hours=168.0).action) == ("go on", "inconclusive")


def test_if_one_policys_sessions_are_rewarded_more_often_their_rewards_are_not_compared():
    heard = {"reward": coins(0.2, 0.6, n=600)}
    verdict = said(reward=sessions(1.0, 0.0), heard=heard)
    assert (verdict.action, verdict.metrics["signals"]["reward"]["says"]) == ("go on", "unequal")
    assert "are not alike and are not compared" in verdict.reason
    assert said(reward=sessions(1.0, 0.0), heard={"reward": coins(0.4, 0.4, n=600)}).action == "promote"
    assert said(reward=sessions(1.0, 0.0), heard=heard, failed=sessions(1.0, 0.0)).action == "roll back"


def test_what_is_better_only_among_those_who_speak_waits_until_silence_cannot_explain_it():
    better = coins(0.9, 0.3)
    verdict = said(feedback=better, with_silence={"feedback": coins(0.3, 0.3)})
    assert (verdict.action, verdict.metrics["signals"]["feedback"]["says"]) == ("go on", "silent")
    words = "its people's feedback is better where there is any, but that is not proven with silence counted as 0: 0."
    assert verdict.reason.startswith(words)
    assert said(feedback=better, with_silence={"feedback": []}).action == "go on"  # too early to know who is silent
    assert said(feedback=better, with_silence={"feedback": coins(0.6, 0.2)}).action == "promote"
    assert said(feedback=better, with_silence={"reward": coins(0.3, 0.3)}).action == "promote"


def test_sessions_that_nobody_judged_count_in_the_forecast():
    judged = coins(0.6, 0.5, n=200, share=0.5)
    few, many = (
        said((Arm(9, sessions, 0), Arm(9, sessions, 0)), reward=judged, hours=24.0).metrics["sessions_needed"]
        for sessions in (100, 5_000)
    )
    assert many == pytest.approx(50 * few, rel=0.01)


def test_how_much_more_silence_takes_is_said():
    few = coins(0.08, 0.06, n=2_000, share=0.5)
    verdict = said(feedback=coins(0.9, 0.3), with_silence={"feedback": few})
    assert verdict.metrics["signals"]["feedback"]["says"] == "silent"
    assert 0 < verdict.metrics["sessions_needed"] < 20_000


def test_a_policy_that_may_be_worse_is_not_called_better_where_silence_hides_it():
    few = coins(0.02, 0.2, n=200, share=0.5)
    config = CanaryConfig(margin=-0.05)
    verdict = said(feedback=coins(0.9, 0.6), with_silence={"feedback": few}, config=config)
    assert "people's feedback is not worse by 0.05 where there is any, but that is not proven with" in verdict.reason


def test_what_was_proven_among_those_who_speak_is_not_given_up_because_it_fell_later():
    later = [one._replace(at=one.at + 1_000) for one in coins(0.3, 0.5, n=400, share=0.5, seed=1)]
    said_more = [*coins(0.95, 0.2, n=60, share=0.5), *later]
    verdict = said(feedback=said_more, with_silence={"feedback": coins(0.08, 0.06, n=2_000, share=0.5)}, hours=30.0)
    signal = verdict.metrics["signals"]["feedback"]
    assert (verdict.action, signal["says"], signal["difference"] < 0) == ("go on", "silent", True)
    assert 0 < verdict.metrics["sessions_needed"] < 20_000


@pytest.mark.parametrize(
    ("own", "percents", "against", "then"),
    [(11, (5.0,), False, None), (12, (5.0,), False, 20.0), (60, (5.0,), False, 50.0), (60, (5.0, 50.0), False, None),
     (12, (30.0,), False, None), (60, (5.0, 20.0), True, 5.0), (60, (5.0,), True, None), (60, (), False, None),
     (60, (5.0, 1.0), False, None)],
)  # fmt: skip
def test_the_share_grows_and_falls(own: int, percents: tuple[float, ...], against: bool, then: float | None):
    failed = sessions(0.0, 0.0)
    if against:
        failed += [Observation(1_000.0 + n, True, 1.0, 0.2) for n in range(2)]
    verdict = said((Arm(own, own, 0), Arm(500, 500, 0)), failed=failed, percents=percents)
    assert (verdict.action, verdict.percent) == ("go on", then)
    assert (
        said((Arm(own, own, 0), Arm(500, 500, 0)), percents=percents, config=replace(CONFIG, ramp=())).percent is None
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1, 1.5])
def test_what_cannot_be_read_is_no_evidence_and_bars_the_promotion(value: float):
    better, wrong = sessions(1.0, 0.0), [Observation(900.0, True, value, 0.2)]
    verdict = said(reward=[*better, *wrong], feedback=better)
    assert verdict.action == "go on"
    assert verdict.reason == f"a value of reward is {value}, not from 0 to 1, so it cannot be compared"
    assert said(reward=[*better, *wrong], hours=168.0).action == "inconclusive"
    assert said(reward=[*better, *wrong], failed=sessions(1.0, 0.0)).action == "roll back"


def test_a_negative_margin_promotes_what_is_not_worse():
    equal = coins(0.5, 0.5, n=4_000, share=0.5)
    assert said(reward=equal).action == "go on"
    verdict = said(reward=equal, config=replace(CONFIG, margin=-0.2))
    assert (verdict.action, "not worse by 0.2" in verdict.reason) == ("promote", True)


def test_a_reward_that_says_little_does_not_outvote_feedback():
    """Where a policy may be a little worse, a reward that is nearly always 1 proves that alone."""
    config = replace(CONFIG, margin=-0.05)
    always = coins(1.0, 1.0, n=4_000, share=0.5)
    worse = coins(0.7, 0.9, n=40, share=0.5)  # too few to prove it
    verdict = said(reward=always, feedback=worse, config=config)
    assert verdict.action == "go on"
    estimate = (
        r"by people's feedback it seems worse, by 0\.\d{3} ± 0\.\d{3} of 1 as estimated from \d+ sessions of its own"
    )
    assert re.fullmatch(estimate, verdict.reason)
    assert said(reward=always, feedback=coins(0.9, 0.9, n=40, share=0.5), config=config).action == "promote"
    assert said(reward=always, config=config).action == "promote"


def test_every_figure_is_there_and_is_json():
    verdict = said(reward=sessions(0.25, 0.75, n=30), latency_ms=[*sessions(20.0, 10.0, n=30)])
    metrics = json.loads(json.dumps(verdict.metrics, allow_nan=False))
    assert metrics["challenger"] == {"calls": 100, "sessions": 40, "failed": 0}
    assert metrics["hours"] == 1.0
    assert set(metrics["signals"]) == {signal.name for signal in SIGNALS}
    assert metrics["signals"]["failed"] == {"says": "no data", "compared": 0}
    reward = metrics["signals"]["reward"]
    assert (reward["challenger"], reward["champion"], reward["tolerance"]) == (0.25, 0.75, 0.0)
    assert reward["difference"] < 0 < reward["error"]
    assert {"worse", "worse_needed", "better", "better_needed"} < reward.keys()
    assert "difference" not in metrics["signals"]["latency_ms"]


@given(
    st.dictionaries(
        st.sampled_from([signal.name for signal in SIGNALS]),
        st.lists(st.tuples(st.booleans(), st.floats(0, 1) | st.just(math.nan)), max_size=40),
    ),
    st.floats(0, 200),
)
def test_whatever_the_evidence_only_a_proof_promotes(values: dict[str, list[tuple[bool, float]]], hours: float):
    seen = {
        name: [Observation(0.0, ours, value, 0.3) for ours, value in its] for name, its in values.items()
    }  # fmt: skip
    verdict = said(hours=hours, **seen)
    signals = verdict.metrics["signals"]
    json.dumps(verdict.metrics, allow_nan=False)
    if verdict.action == "promote":
        assert any(signals[name]["says"] == "better" for name in ("reward", "feedback"))
        assert not any(one["says"] in ("worse", "unreadable") for one in signals.values())
    if verdict.action == "go on":
        assert hours < CONFIG.max_hours
    assert verdict.reason


@pytest.mark.parametrize(
    "wrong",
    [{"alpha": 0.0}, {"alpha": math.nan}, {"max_hours": 0.0}, {"reward_tolerance": 1.0}, {"latency_ratio": 0.5},
     {"rest_s": 0.0}, {"silence_s": 0.0}, {"silence_s": 1e6}, {"min_sessions": 0}, {"margin": 1.0}],
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, float]):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CanaryConfig(**wrong)  # type: ignore[arg-type]


def test_a_winner_that_is_barred_for_long_has_metrics_that_json_can_hold():
    barred = [Observation(0.0, True, math.nan, 0.2), Observation(0.0, False, 0.0, 0.2)]
    verdict = said(reward=sessions(1.0, 0.0, n=6_000), failed=barred)
    assert verdict.action == "go on"
    assert json.loads(json.dumps(verdict.metrics, allow_nan=False))["signals"]["reward"]["better"] > 1e6
