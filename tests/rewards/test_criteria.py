"""Weighted criteria, with numbers worked out by hand."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from art_patch.errors import ConfigError
from art_patch.rewards import RULER, disagreement, kept_scores, load_combination, rewards_G, satisfaction_G
from art_patch.rewards.combine import Disagreement, criterion_scores
from art_patch.rewards.criteria import (
    DEFAULT_CRITERIA,
    accuracy_G,
    completeness_G,
    efficiency_G,
    load_criteria,
    weighted_G,
)
from art_patch.types import Call, Choice, Group, Score, Trajectory, TrajectoryInfo

ASK = {"role": "user", "content": "how many plums?"}
TOOL = {"id": "c1", "type": "function", "function": {"name": "count", "arguments": "{}"}}


def run_of(key: str, *, tokens: int = 10, tools: int = 0, finish: str | None = "stop", **about: Any) -> Trajectory:
    """A run that calls `tools` tools, one a call, and answers."""
    said: list[dict[str, Any]] = [ASK]
    calls: list[Call] = []
    for number in range(tools + 1):
        last = number == tools
        answer = {"role": "assistant", "content": "12"}
        if not last:
            answer = {"role": "assistant", "content": None, "tool_calls": [TOOL | {"id": f"{key}-{number}"}]}
        choice = Choice(0, answer, finish if last else "tool_calls")
        calls.append(Call(f"{key}-{number}", key, float(number), "m", tuple(said), (choice,), completion_tokens=tokens))
        said += [answer, {"role": "tool", "tool_call_id": f"{key}-{number}", "content": "12"}]
    return Trajectory(TrajectoryInfo(key, 0.0, "explicit", **about), tuple(calls))


def given(run: Trajectory, value: float, name: str = "ruler", source: str = "ruler", at: float = 1.0) -> Trajectory:
    score = Score(f"{run.id}-{name}-{source}-{at}", run.id, name, value, source, at, group_id="g")
    return replace(run, scores=(*run.scores, score))


def group_of(*runs: Trajectory) -> Group:
    return Group("g", "task", "same_task", runs)


def test_accuracy_is_the_judges_unless_a_check_says():
    a, b, c = (given(run_of(key), 0.5) for key in "abc")
    group = group_of(a, given(b, 1.0, "accuracy", "code"), given(c, 7.0, "accuracy", "code"), run_of("d"))
    assert accuracy_G(group) == (0.5, 1.0, 0.5, None)


def test_efficiency_compares_those_that_got_equally_far():
    least = given(run_of("least", tokens=9), 0.9)
    twice = given(run_of("twice", tokens=19, tools=1), 0.8)  # 2 calls of 19 tokens, 1 tool
    lazy = given(run_of("lazy", tokens=1), 0.6)
    assert efficiency_G(group_of(least, twice, lazy, run_of("unknown"))) == (
        1.0,
        pytest.approx((10 / 39 + 2 / 3 + 1 / 2) / 3),
        0.0,
        None,
    )


def test_tokens_that_were_not_counted_are_left_out():
    group = group_of(given(run_of("a", tokens=0), 0.9), given(run_of("b", tokens=50, tools=1), 0.9))
    assert efficiency_G(group) == (1.0, pytest.approx((2 / 3 + 1 / 2) / 2))


def test_where_nobody_got_anywhere_laziness_is_no_merit():
    assert efficiency_G(group_of(given(run_of("a", tokens=1), 0.4), given(run_of("b"), 0.3))) == (None, None)


def last_answer(run: Trajectory, message: dict[str, Any]) -> Trajectory:
    *before, last = run.calls
    return replace(run, calls=(*before, replace(last, choices=(replace(last.choices[0], message=message),))))


def copy_that_calls() -> Trajectory:
    run = last_answer(run_of("copy", finish="tool_calls"), {"role": "assistant", "content": None, "tool_calls": [TOOL]})
    return replace(run, info=replace(run.info, origin="resampled"))


@pytest.mark.parametrize(
    ("run", "value"),
    [
        (run_of("whole", tools=2), 1.0),
        (run_of("cut", finish="length"), 0.5),
        (run_of("cut-in-the-wire", finish=None), 0.5),
        (run_of("raised", error="ValueError: no"), 0.0),
        (Trajectory(TrajectoryInfo("none", 0.0), ()), 0.0),
        (replace(run_of("silent"), calls=(replace(run_of("silent").calls[0], choices=()),)), 0.0),
        (last_answer(run_of("empty"), {"role": "assistant", "content": ""}), 0.0),
        (last_answer(run_of("asks", finish="tool_calls"), {"role": "assistant", "tool_calls": [TOOL]}), 0.0),
        (last_answer(run_of("open"), {"role": "assistant", "content": "wait", "tool_calls": [TOOL]}), 0.5),
        (replace(run_of("f"), calls=(replace(run_of("f").calls[0], status="cancelled"),)), 0.5),
        (copy_that_calls(), 1.0),
        (replace(copy_that_calls(), info=TrajectoryInfo("ends-as-its-run-did", 0.0, "branch")), 0.0),
    ],
    ids=lambda value: value.id if isinstance(value, Trajectory) else None,
)
def test_completeness(run: Trajectory, value: float):
    assert completeness_G(group_of(run)) == (value,)


def test_satisfaction_is_what_people_said_and_nothing_else():
    up, down, minus = (given(run_of(str(v)), v, "thumbs", "user") for v in (1.0, 0.0, -1.0))
    both = given(up, 0.5, "rating", "user")
    changed = given(up, 0.0, "thumbs", "user", at=2.0)
    stars = given(run_of("stars"), 4.0, "rating", "user")
    code = given(run_of("code"), 1.0, "thumbs", "code")
    group = group_of(up, down, minus, both, changed, stars, code, run_of("silent"))
    assert satisfaction_G(group) == (1.0, 0.0, 0.0, 0.75, 0.0, None, None, None)


def test_the_weighted_mean_by_hand():
    said = given(given(run_of("said", tokens=9), 0.9), 0.0, "thumbs", "user")
    silent = given(run_of("silent", tokens=9, finish="length"), 0.9)
    group = group_of(said, silent, run_of("not-judged"))
    assert weighted_G(group, DEFAULT_CRITERIA) == (
        pytest.approx(0.4 * 0.9 + 0.3 * 1.0 + 0.2 * 1.0 + 0.1 * 0.0),
        pytest.approx((0.4 * 0.9 + 0.3 * 1.0 + 0.2 * 0.5) / 0.9),
        None,
    )
    assert rewards_G(group, combination=load_combination("criteria")) == weighted_G(group, DEFAULT_CRITERIA)


def test_a_lazy_wrong_answer_does_not_win():
    right = given(run_of("right", tokens=400, tools=4), 0.9)
    lazy = given(run_of("lazy", tokens=1), 0.2)
    best, worst = rewards_G(group_of(right, lazy), combination=load_combination("criteria"))
    assert best is not None
    assert worst is not None
    assert best > worst


def test_values_are_kept_side_by_side_and_replaced():
    group = group_of(given(run_of("a"), 0.9))
    scores = criterion_scores(group, DEFAULT_CRITERIA, now=5.0)
    assert [(s.name, s.value, s.source, s.group_id, s.rubric, s.at) for s in scores] == [
        ("criterion.accuracy", 0.9, "criteria", "g", "1", 5.0),
        ("criterion.efficiency", 1.0, "criteria", "g", "1", 5.0),
        ("criterion.completeness", 1.0, "criteria", "g", "1", 5.0),
    ]
    again = criterion_scores(group, DEFAULT_CRITERIA, now=6.0)
    assert [score.id for score in scores] == [score.id for score in again]


def test_what_is_kept_of_a_combination():
    group = group_of(given(run_of("a"), 0.9), run_of("b"))
    assert kept_scores(group, combination=RULER) == ()
    *_, result = kept_scores(group, combination=load_combination("criteria"), now=5.0)
    assert (result.trajectory_id, result.name, result.source, result.comment) == ("a", "reward", "combined", "criteria")
    assert result.value == rewards_G(group, combination=load_combination("criteria"))[0]
    # What was kept is no reward of the user's, and does not come back into any rule.
    assert rewards_G(group, [replace(result, value=0.1)]) == (0.9, None)
    only_accuracy = load_combination("criteria", criteria="efficiency=0,completeness=0,satisfaction=0")
    *_, other = kept_scores(group, combination=only_accuracy)
    assert (other.id, other.value) == (result.id, 0.9)
    assert other.rubric != result.rubric


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_rules", raising=False)
    (tmp_path / "my_rules.py").write_text(
        "def tone(group):\n    return [0.5 for _ in group.trajectories]\n"
        "def few(group):\n    return []\n"
        "def huge(group):\n    return [2.0 for _ in group.trajectories]\n"
        "def text(group):\n    return ['good' for _ in group.trajectories]\n"
        "def nan(group):\n    return [float('nan') for _ in group.trajectories]\n"
        "def best(group):\n    return [len(t.scores) or None for t in group.trajectories]\n"
    )


def test_weights_and_rules_of_ones_own(rules: None):
    criteria = load_criteria("accuracy=0.5, efficiency=0,tone=0.5@my_rules:tone")
    assert [(one.name, one.weight, one.required) for one in criteria] == [
        ("accuracy", 0.5, True), ("completeness", 0.2, False), ("satisfaction", 0.1, False), ("tone", 0.5, False),
    ]  # fmt: skip
    assert weighted_G(group_of(given(run_of("a"), 0.9)), criteria) == (
        pytest.approx((0.5 * 0.9 + 0.2 * 1.0 + 0.5 * 0.5) / 1.2),
    )
    assert load_criteria(None) == DEFAULT_CRITERIA
    # Whatever says what accuracy is, without it there is no reward.
    assert load_criteria("accuracy=1@my_rules:tone")[0].required


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("accuracy", "name=weight"),
        ("accuracy=much", "name=weight"),
        ("accuracy=1.2.3", "name=weight"),
        ("tone=0.2", "no rule"),
        ("accuracy=0,efficiency=0,completeness=0,satisfaction=0", "no criterion"),
        ("tone=0.2@my_rules:rude", "no function 'rude'"),
    ],
)
def test_criteria_that_cannot_be_read(rules: None, text: str, words: str):
    with pytest.raises(ConfigError, match=words):
        load_criteria(text)


@pytest.mark.parametrize(
    ("rule", "words"), [("few", "0 values"), ("huge", "gave 2.0"), ("nan", "gave nan"), ("text", "gave 'good'")]
)
def test_a_rule_that_gives_nonsense_stops_the_cycle(rules: None, rule: str, words: str):
    criteria = load_criteria(f"mine=1@my_rules:{rule}")
    with pytest.raises(ConfigError, match=words):
        weighted_G(group_of(given(run_of("a"), 0.9)), criteria)


def test_a_combination_of_ones_own(rules: None):
    group = group_of(given(given(run_of("a"), 0.9), 1.0, "thumbs", "user"), run_of("b"))
    mine = load_combination("my_rules:best")
    assert rewards_G(group, combination=mine) == (2, None)
    (kept,) = kept_scores(group, combination=mine)
    assert (kept.value, kept.comment, kept.rubric) == (2, "my_rules:best", mine.version)
    for nonsense, words in (("few", "0 numbers"), ("nan", "gave nan"), ("text", "gave 'good'")):
        with pytest.raises(ConfigError, match=words):
            rewards_G(group, combination=load_combination(f"my_rules:{nonsense}"))
    with pytest.raises(ConfigError, match="is not ruler, criteria"):
        load_combination("best")


def test_where_people_and_the_judge_differ():
    def sibling(key: str, judge: float | None, people: float | None) -> Trajectory:
        run = run_of(key) if judge is None else given(run_of(key), judge)
        return run if people is None else given(run, people, "thumbs", "user")

    agree = group_of(sibling("a", 0.9, 1.0), sibling("b", 0.1, 0.0))
    mixed = group_of(
        sibling("c", 0.2, 1.0), sibling("d", 0.8, 0.0), sibling("e", 0.2, 0.0), sibling("f", 0.5, None),
        sibling("g", None, 0.0),
    )  # fmt: skip
    metrics = disagreement([agree, mixed, group_of(sibling("h", 0.5, 1.0))])
    assert metrics == Disagreement(pairs=3, against=1, tied=1, groups=2)
    assert metrics.share == pytest.approx(1 / 3)
    assert disagreement([]).share is None
