"""The control's rewards: those of the judge, and no sibling's own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from art_patch.demo.judge import STAND_IN_MODEL, ShuffledJudge, serve_stand_in_judge
from art_patch.rewards import Judge
from art_patch.types import Call, Choice, Group, Score, Trajectory, TrajectoryInfo


def sibling(key: str, said: str) -> Trajectory:
    choice = Choice(0, {"role": "assistant", "content": said})
    return Trajectory(
        TrajectoryInfo(key, 0.0), (Call(f"{key}-c", key, 0.0, "m", ({"role": "user", "content": "?"},), (choice,)),)
    )


def group(number: int) -> Group:
    """Two that say the same and are right, six that are wrong, each in words of its own."""
    said = ["right", "right", *(f"wrong {n}" for n in range(6))]
    return Group(f"g{number}", "k", "same_task", tuple(sibling(f"g{number}-{n}", each) for n, each in enumerate(said)))


def test_scores_are_dealt_to_siblings_and_answers_that_are_alike_have_no_luck_in_common():
    groups = [group(number) for number in range(60)]
    told: dict[str, Sequence[Score]] = {}
    with serve_stand_in_judge(lambda messages: float(messages[-1]["content"] == "right")) as url:
        judge = ShuffledJudge(Judge(STAND_IN_MODEL, base_url=url, api_key="none"), seed=1)
        report = judge.score_groups(groups, on_scored=lambda its, scores, _: told.__setitem__(its.id, scores))
        again = judge.score_groups(groups, known=report.scores)

    values: dict[str, dict[str, float]] = defaultdict(dict)
    for score in report.scores:
        values[score.trajectory_id.rpartition("-")[0]][score.trajectory_id] = score.value
    assert all(sorted(dealt.values()) == [0.0] * 6 + [1.0] * 2 for dealt in values.values())
    assert sorted(report.scores, key=_key) == sorted((score for scores in told.values() for score in scores), key=_key)
    assert sorted(again.scores, key=_key) == sorted(report.scores, key=_key)
    right = [dealt[f"{key}-{n}"] for key, dealt in values.items() for n in (0, 1)]
    assert abs(fmean(right) - 2 / 8) < 0.1
    alike = [dealt[f"{key}-0"] == dealt[f"{key}-1"] for key, dealt in values.items()]
    assert abs(fmean(alike) - 16 / 28) < 0.15  # by chance: 1 of 28 pairs both right, 15 both wrong


def _key(score: Score) -> Any:
    return score.id
