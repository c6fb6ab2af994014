"""What becomes of a challenger, for each kind of evidence."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_patch.errors import ConfigError
from art_patch.promotion import CanaryConfig, decide
from art_patch.promotion.evidence import Arm, Block, Evidence
from art_patch.promotion.sequential import SIGNALS

CONFIG = CanaryConfig()
ARMS = (Arm(100, 40, 0), Arm(1_000, 400, 0))


def pairs(*values: tuple[float, float], times: int = 1) -> list[Block]:
    """Blocks of one value each: challenger's, champion's."""
    return [Block(float(at), (ours,), (theirs,)) for at, (ours, theirs) in enumerate(values * times)]


def said(arms: tuple[Arm, Arm] = ARMS, *, state="canary", hours: float = 1.0, config: CanaryConfig = CONFIG, **blocks):
    return decide(Evidence(*arms, blocks), state=state, hours=hours, config=config)


WORSE = {
    "reward": pairs((0.2, 0.8), times=40),
    "feedback": pairs((0.0, 1.0), times=20),
    "errors": pairs((1.0, 0.0), times=20),
    "fallbacks": pairs((1.0, 0.0), (0.0, 0.0), times=40),
    "empty": pairs((1.0, 0.0), times=20),
    "latency_ms": pairs((400.0, 100.0), times=20),
    "ttft_ms": pairs((90.0, 30.0), times=20),
}


def test_there_is_a_case_for_every_signal():
    assert {signal.name for signal in SIGNALS} == set(WORSE)


@pytest.mark.parametrize("name", WORSE)
def test_what_is_proven_worse_on_any_signal_is_rolled_back(name: str):
    verdict = said(**{name: WORSE[name]})
    assert verdict.action == "roll back"
    assert verdict.metrics["signals"][name]["says"] == "worse"
    assert f"in {len(WORSE[name])} comparisons" in verdict.reason


@pytest.mark.parametrize("name", WORSE)
def test_the_other_way_round_only_rewards_and_feedback_promote(name: str):
    swapped = [Block(at, theirs, ours) for at, ours, theirs in WORSE[name]]
    verdict = said(**{name: swapped})
    promotes = next(signal.promotes for signal in SIGNALS if signal.name == name)
    assert verdict.action == ("promote" if promotes else "go on")
    assert promotes == (name in ("reward", "feedback"))


def test_better_answers_do_not_excuse_errors():
    verdict = said(feedback=pairs((1.0, 0.0), times=40), errors=WORSE["errors"])
    assert verdict.action == "roll back"
    assert (
        verdict.reason == "its share of failed calls is worse by more than 0.02: 1.000 against 0.000 in 20 comparisons"
    )


def test_equal_arms_go_on_and_end_without_an_answer_which_is_no_promotion():
    rng = random.Random(0)
    equal = pairs(*((rng.random(), rng.random()) for _ in range(300)))
    assert said(reward=equal, errors=pairs((0.0, 0.0), times=300)).action == "go on"
    verdict = said(reward=equal, hours=24.0)
    assert (verdict.action, verdict.reason) == (
        "inconclusive",
        "no answer within 24 hours: neither worse nor better is proven yet",
    )
    assert said(reward=equal, hours=math.nan).action == "inconclusive"


def test_a_proof_counts_at_the_last_moment_too():
    assert said(feedback=WORSE["feedback"], hours=25.0).action == "roll back"
    assert said(feedback=pairs((1.0, 0.0), times=40), hours=25.0).action == "promote"


def test_with_too_few_sessions_nothing_is_promoted():
    better = pairs((1.0, 0.0), times=40)
    verdict = said((Arm(50, 19, 0), Arm(500, 200, 0)), feedback=better)
    assert (verdict.action, verdict.reason) == (
        "go on",
        "19 sessions of its own, 200 of the champion's; 20 of each are needed",
    )
    assert said((Arm(50, 20, 0), Arm(500, 200, 0)), feedback=better).action == "promote"


def test_a_shadow_is_rolled_back_but_never_promoted():
    better = pairs((1.0, 0.0), times=40)
    assert said(state="shadow", feedback=better).action == "go on"
    assert said(state="shadow", feedback=better, hours=30.0).action == "inconclusive"
    assert said(state="shadow", errors=WORSE["errors"]).action == "roll back"


def test_without_a_champion_there_is_nothing_to_compare():
    alone = (Arm(100, 40, 0), Arm())
    assert said(alone).action == "go on"
    assert "nothing to compare" in said(alone).reason
    assert said(alone, hours=24.0).action == "inconclusive"
    assert said((Arm(5, 5, 3, 3, 3), Arm())).action == "roll back"


def arm(sessions: int, failed: int, latest: int = 0) -> Arm:
    """Sessions of three calls each; those that failed did so in every call."""
    return Arm(3 * sessions, sessions, 3 * failed, failed, latest)


def test_the_first_failed_sessions_count_at_once_unless_the_champion_fails_alike():
    verdict = said((arm(5, 4, 4), arm(30, 1)))
    assert verdict.action == "roll back"
    assert verdict.reason == (
        "in 4 of its 5 sessions the newest call failed or was left to upstream, in 1 of 30 of the champion's"
    )
    assert said((arm(3, 3, 3), arm(30, 1))).action == "roll back"
    assert said((arm(2, 2, 2), arm(30, 1))).action == "go on"
    assert said((Arm(900, 2, 900, 2, 2), arm(30, 0))).action == "go on"  # however often the two tried
    assert said((arm(5, 5, 5), arm(30, 15, 5))).action == "go on"  # the engine was down for both


def test_the_newest_sessions_count_by_themselves_after_many_that_were_good():
    verdict = said((arm(300, 6, 6), arm(900, 30, 0)))
    assert (verdict.action, verdict.reason) == (
        "roll back",
        "in 6 of its 10 newest sessions the newest call failed or was left to upstream, in 0 of 10 of the champion's",
    )
    assert said((arm(300, 5, 5), arm(900, 30, 0))).action == "go on"
    assert said((arm(300, 10, 10), arm(900, 30, 8))).action == "go on"  # both fail
    sensitive = replace(CONFIG, hard_share=0.05)
    assert said((arm(300, 2, 2), arm(900, 0, 0)), config=sensitive).action == "go on"  # two sessions are no proof


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1, 1.5])
def test_what_cannot_be_read_is_no_evidence_and_bars_the_promotion(value: float):
    better = pairs((1.0, 0.0), times=40)
    verdict = said(reward=[*better, *pairs((value, 0.0))], feedback=better)
    assert verdict.action == "go on"
    assert verdict.reason == f"a value of reward is {value}, not from 0 to 1, so it cannot be compared"
    assert said(reward=[*better, *pairs((0.0, value))], hours=24.0).action == "inconclusive"
    assert said(reward=pairs((value, 0.0)), errors=WORSE["errors"]).action == "roll back"


def test_a_negative_margin_promotes_what_is_not_worse():
    equal = pairs((0.6, 0.6), (0.5, 0.5), times=300)
    assert said(reward=equal).action == "go on"
    verdict = said(reward=equal, config=replace(CONFIG, margin=-0.05))
    assert (verdict.action, "not worse by 0.05" in verdict.reason) == ("promote", True)


def test_every_figure_is_there_and_is_json():
    verdict = said(reward=pairs((0.25, 0.75), times=10), latency_ms=pairs((20.0, 10.0)))
    metrics = json.loads(json.dumps(verdict.metrics))
    assert metrics["challenger"] == {"calls": 100, "sessions": 40, "failed": 0}
    assert metrics["hours"] == 1.0
    assert set(metrics["signals"]) == {signal.name for signal in SIGNALS}
    assert metrics["signals"]["errors"] == {"says": "no data", "compared": 0}
    reward = metrics["signals"]["reward"]
    assert (reward["compared"], reward["challenger"], reward["champion"], reward["difference"]) == (
        10,
        0.25,
        0.75,
        -0.5,
    )
    assert reward["above"] < -0.5 < reward["below"]
    assert metrics["signals"]["latency_ms"] == {
        "says": "open", "compared": 1, "challenger": 20.0, "champion": 10.0, "tolerance": 1.5,
    }  # fmt: skip


@given(
    st.dictionaries(
        st.sampled_from([signal.name for signal in SIGNALS]),
        st.lists(
            st.tuples(st.floats(0, 1) | st.just(math.nan), st.floats(0, 1)).map(lambda p: Block(0.0, (p[0],), (p[1],))),
            max_size=40,
        ),
    ),
    st.floats(0, 48),
)
def test_whatever_the_evidence_only_a_proof_promotes(blocks: dict[str, list[Block]], hours: float):
    verdict = decide(Evidence(*ARMS, blocks), state="canary", hours=hours, config=CONFIG)
    signals = verdict.metrics["signals"]
    if verdict.action == "promote":
        assert any(signals[name]["says"] == "better" for name in ("reward", "feedback"))
        assert not any(one["says"] in ("worse", "unreadable") for one in signals.values())
    if verdict.action == "go on":
        assert hours < CONFIG.max_hours
    assert verdict.reason


def test_equal_challengers_are_hardly_ever_promoted_or_rolled_back(record_property):
    """All signals at once, after every tenth session; rewards 0 or 1, errors of 3 %, latencies with a long tail."""
    ended = {"roll back": 0, "promote": 0, "go on": 0}
    runs, sessions = 40, 300
    for seed in range(runs):
        rng = random.Random(seed)

        def one(of):
            return [Block(float(at), (of(),), (of(),)) for at in range(sessions)]

        blocks = {
            "reward": one(lambda: float(rng.random() < 0.5)),  # noqa: B023 - called at once
            "errors": one(lambda: float(rng.random() < 0.03)),  # noqa: B023
            "latency_ms": one(lambda: rng.lognormvariate(5, 1)),  # noqa: B023
        }
        # What was proven once stays proven, so one look at the end tells of all looks before.
        ended[said(**blocks).action] += 1
    for action in ("roll back", "promote"):
        record_property("figure", [f"equal challengers: {action}", f"{ended[action] / runs:.3f}", "<= 0.05"])
        assert ended[action] / runs <= 0.05


@pytest.mark.parametrize(
    "wrong",
    [{"alpha": 0.0}, {"alpha": math.nan}, {"max_hours": 0.0}, {"reward_tolerance": 1.0}, {"latency_ratio": 0.5},
     {"hard_share": 0.0}, {"min_sessions": 0}, {"margin": 1.0}, {"hard_sessions": 1}],
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, float]):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CanaryConfig(**wrong)  # type: ignore[arg-type]
