"""What the judge and people say of a canary, side by side."""

from __future__ import annotations

import random

import pytest

from art_patch.promotion import CanaryConfig, WatchVerdict, decide, evidence_of, with_gains
from art_patch.types import ArmCall, ArmTraffic, Score

NEW, OLD = "agent@1", "agent@0"


def report(sessions: int, *, judged: float, liked: float, heard: float = 1.0, judge: bool = True) -> WatchVerdict:
    """Half of the sessions are the canary's, the judge's scores differ by `judged`, and people's by `liked`."""
    rng = random.Random(sessions)
    calls: list[ArmCall] = []
    scores: list[Score] = []
    for n in range(sessions):
        new, at, group = rng.random() < 0.5, 100.0 * n, f"g{n // 4}" if judge else None
        calls.append(
            ArmCall(
                f"c{n}", f"t{n}", f"s{n}", group, at, NEW if new else OLD,
                duration_ms=10.0, status="ok", fell_back=False, ttft_ms=None, empty=False,
            )
        )  # fmt: skip
        if judge:
            value = 0.5 + judged * new + rng.uniform(-0.2, 0.2)
            scores.append(Score(f"j{n}", f"t{n}", "ruler", value, "ruler", at + 500.0, group_id=group))
        if rng.random() < heard:
            value = float(rng.random() < 0.5 + liked * new)
            scores.append(Score(f"f{n}", f"t{n}", "thumbs", value, "user", at + 1.0))
    traffic, now = ArmTraffic(tuple(calls), tuple(scores), ((-100.0, 50.0),)), 100.0 * sessions + 1e5
    found = evidence_of(traffic, challenger=NEW, champion=OLD, state="canary", now=now)
    return with_gains(decide(found, state="canary", hours=24.0, config=CanaryConfig()), found)


def test_a_judge_that_likes_it_while_people_do_not_is_named():
    verdict = report(400, judged=0.2, liked=-0.4)
    judge, people = verdict.metrics["gains"]
    assert (judge["name"], judge["count"], people["name"]) == ("the judge", 400, "people's feedback")
    assert judge["mean"] == pytest.approx(0.2, abs=0.05) and people["mean"] == pytest.approx(-0.4, abs=0.1)
    assert judge["low"] > 0 > people["high"]
    assert verdict.action == "roll back"
    assert verdict.reason.endswith("; the judge and people's feedback disagree: the policy may please the judge alone")


def test_too_little_feedback_says_how_much_it_takes():
    verdict = report(400, judged=0.1, liked=0.0, heard=0.1)
    assert "a loss in people's feedback as large as the gain in the judge takes about " in verdict.reason
    assert verdict.reason.endswith(" sessions with feedback to show")


def test_a_few_sessions_have_no_limits_and_name_no_disagreement():
    for sessions in (4, 8, 40):
        verdict = report(sessions, judged=0.9, liked=-1.0)
        for one in verdict.metrics["gains"]:
            assert (one["low"], one["high"]) == (-1.0, 1.0) and -1 <= one["mean"] <= 1
        assert "disagree" not in verdict.reason


def test_without_a_judge_nothing_is_compared():
    verdict = report(100, judged=0.0, liked=-0.2, judge=False)
    assert "gains" not in verdict.metrics and "gains:" not in verdict.reason
    alone = report(100, judged=0.1, liked=0.0, heard=0.0)
    assert [one["name"] for one in alone.metrics["gains"]] == ["the judge"]
    assert "gains:" not in alone.reason
