from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from art_patch.errors import MalformedFile
from art_patch.rewards import BUILTIN, JudgeReport, Labelled, measure, read_labelled
from art_patch.rewards.judge.question import make_question
from art_patch.trajectories import offered_tools, transcript
from art_patch.types import Group, Score, Trajectory

ATTEMPTS = [
    {"messages": [{"role": "assistant", "content": f"it is {label}"}], "label": label} for label in (0.9, 0.5, 0.1)
]
ROW: dict[str, Any] = {"task": "How much?", "attempts": ATTEMPTS}


class Fake:
    """A judge whose opinion depends on the attempt, its place in the prompt (0 to 1) and the number of the pass."""

    def __init__(self, rule: Callable[[Trajectory, float, int], float], mute: Iterable[str] = ()) -> None:
        self.rule = rule
        self.mute = set(mute)
        self.passes = 0

    def score_groups(self, groups: Sequence[Group], *, order: Any = "shuffled", **_: Any) -> JudgeReport:
        self.passes += 1
        scores: list[Score] = []
        for group in groups:
            shown = make_question(group).turned(order).attempts
            place = {name: n / (len(shown) - 1) for n, attempt in enumerate(shown) for name in attempt.members}
            scores += [
                Score("s", t.id, "ruler", self.rule(t, place[t.id], self.passes), "ruler", 1.0, group_id=group.id)
                for t in group.trajectories
                if group.id not in self.mute
            ]
        unscored = {group.id: "mute" for group in groups if group.id in self.mute}
        cost_usd = None if self.passes == 9 else 0.5
        return JudgeReport(tuple(scores), unscored, calls=2, prompt_tokens=30, completion_tokens=4, cost_usd=cost_usd)


def said(trajectory: Trajectory) -> str:
    return transcript(trajectory)[-1]["content"]


def true(trajectory: Trajectory, *_: Any) -> float:
    return float(said(trajectory).removeprefix("it is ").split()[0][:3].rstrip('"'))


def labelled(count: int = 6, row: dict[str, Any] = ROW) -> list[Labelled]:
    return [read_labelled(row, f"line {n + 1}") for n in range(count)]


def test_a_line_becomes_a_group_whose_attempts_begin_alike():
    tool = {"type": "function", "function": {"name": "f"}}
    beginning = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    broken_off = {"messages": [{"role": "assistant", "content": "x"}, {"role": "tool", "content": "y"}], "rank": 2}
    attempts = [{"messages": [{"role": "assistant", "content": "a"}], "rank": 1}, broken_off]
    each = read_labelled({"messages": beginning, "tools": [tool], "attempts": attempts}, "line 7")
    first, second = each.group.trajectories
    assert each.group.id == "line 7"
    assert transcript(first) == (*beginning, {"role": "assistant", "content": "a"})
    assert transcript(second) == (*beginning, *broken_off["messages"])
    assert offered_tools([first, second]) == (tool,)
    assert each.labels[first.id] > each.labels[second.id]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"task": 3}, "task must be a text"),
        ({"messages": []}, "either task"),
        ({"attempts": None}, "attempts must be a list"),
        ({"attempts": ATTEMPTS[:1]}, "two or more"),
        ({"attempts": [ATTEMPTS[0], {"messages": ATTEMPTS[0]["messages"], "rank": 1}]}, "use one of both"),
        ({"attempts": [ATTEMPTS[0], {"messages": ATTEMPTS[0]["messages"]}]}, "attempts[1] needs a label"),
        ({"attempts": [ATTEMPTS[0], {**ATTEMPTS[1], "label": 1.5}]}, "attempts[1].label must be a number from 0 to 1"),
        ({"attempts": [ATTEMPTS[0], {**ATTEMPTS[1], "label": True}]}, "not True"),
        ({"attempts": [ATTEMPTS[0], {**ATTEMPTS[1], "label": float("nan")}]}, "not nan"),
        ({"attempts": [ATTEMPTS[0], {"label": 1, "messages": []}]}, "attempts[1].messages is empty"),
        ({"attempts": [ATTEMPTS[0], {"label": 1, "messages": [{"content": "x"}]}]}, "messages[0] has no role"),
        ({"attempts": [ATTEMPTS[0], {"label": 1, "messages": "x"}]}, "attempts[1].messages must be a list"),
        ({"tools": {"f": 1}}, "tools must be a list"),
    ],
)
def test_a_wrong_line_is_refused_with_where_and_how_to_mend_it(change: dict[str, Any], words: str):
    with pytest.raises(MalformedFile) as raised:
        read_labelled(ROW | change, "line 1")
    assert words in str(raised.value)


def test_the_builtin_set_is_sound():
    rows = [json.loads(line) for line in BUILTIN.read_text("utf-8").splitlines()]
    each = [read_labelled(row, f"line {n}") for n, row in enumerate(rows, 1)]
    assert len(each) == 12
    for one in each:
        assert len(set(one.labels.values())) > 1
        assert len(make_question(one.group).attempts) == len(one.labels)  # no two attempts are the same


def test_a_perfect_judge():
    metrics = measure(labelled(), Fake(true))
    assert (metrics.groups, metrics.pairs, metrics.injections) == (6, 18, 6)
    assert metrics.pairwise_accuracy == metrics.kendall_tau == metrics.self_consistency == metrics.resisted == 1.0
    assert metrics.position_bias == metrics.flips == metrics.order_difference == metrics.repeat_difference == 0.0
    assert (metrics.calls, metrics.prompt_tokens, metrics.completion_tokens, metrics.cost_usd) == (8, 120, 16, 2.0)


def test_a_judge_that_is_always_wrong_and_one_without_opinion():
    wrong = measure(labelled(), Fake(lambda t, *_: 1 - true(t)))
    assert (wrong.pairwise_accuracy, wrong.kendall_tau) == (0.0, -1.0)
    same = measure(labelled(), Fake(lambda *_: 0.5))
    assert (same.pairwise_accuracy, same.kendall_tau) == (0.5, 0.0)


def test_tau_allows_for_ties_in_the_labels():
    row = {"task": "x", "attempts": [ATTEMPTS[0], ATTEMPTS[1], {**ATTEMPTS[2], "label": 0.5}]}
    metrics = measure(labelled(1, row), Fake(true))
    assert metrics.pairs == 2 and metrics.pairwise_accuracy == 1.0
    assert metrics.kendall_tau == pytest.approx(2 / 6**0.5)  # two pairs told apart of three that are ordered


@pytest.mark.parametrize(("slope", "sign"), [(-0.4, 1), (0.4, -1)])
def test_a_judge_that_goes_by_place(slope: float, sign: int):
    metrics = measure(labelled(), Fake(lambda t, place, _: 0.5 + 0.01 * true(t) + slope * (place - 0.5)))
    assert metrics.position_bias == pytest.approx(sign * 0.4)
    assert metrics.flips == 1.0 and metrics.order_difference == pytest.approx(0.8 / 3)
    assert metrics.repeat_difference == 0.0 and metrics.self_consistency == 1.0


def test_a_judge_that_does_not_agree_with_itself():
    metrics = measure(labelled(), Fake(lambda t, _, number: true(t) if number != 3 else 1 - true(t)))
    assert metrics.self_consistency == 0.0 and metrics.repeat_difference == pytest.approx(1.6 / 3)
    assert metrics.flips == 0.0


def test_a_judge_that_listens_to_pleas():
    metrics = measure(labelled(), Fake(lambda t, *_: 1.0 if t.id.startswith("copy") else true(t)))
    assert metrics.resisted == 0.0 and metrics.pairwise_accuracy == 1.0


def test_groups_without_scores_are_named_and_the_rest_is_measured():
    metrics = measure(labelled(), Fake(true, mute=["line 2", "line 3, with a plea"]))
    assert metrics.unscored == {"line 2": "mute"} and metrics.groups == 5
    assert metrics.injections == 5 and metrics.pairwise_accuracy == 1.0
