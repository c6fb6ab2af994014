from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from art_patch.errors import ConfigError
from art_patch.rewards import Check, load_checks, run_checks
from art_patch.rewards.checks import make_check
from art_patch.settings import load_settings
from art_patch.types import Group, Trajectory

Groups = Callable[..., list[Group]]


def short(trajectory: Trajectory) -> float:
    return 1 / len(trajectory.calls[0].choices[0].message["content"])


def checked(function: Callable[[Trajectory], Any], trajectory: Trajectory, **options: Any) -> Any:
    return run_checks([trajectory], [make_check(function)], **options)


def test_a_check_sees_the_whole_run_and_its_number_is_a_score(groups_of: Groups) -> None:
    (group,) = groups_of(1, siblings=2)
    scores, failures = run_checks(group.trajectories, [make_check(short)], now=7.0)
    assert failures == {}
    assert [(s.trajectory_id, s.name, s.value, s.source, s.at) for s in scores] == [
        ("g0-0", "short", 1 / 8, "code", 7.0),
        ("g0-1", "short", 1 / 8, "code", 7.0),
    ]


@pytest.mark.parametrize(
    ("returned", "values"),
    [
        (True, {"f": 1.0}),
        (False, {"f": 0.0}),
        (None, {}),
        ({"a": 0.5, "b": None, "c": True}, {"a": 0.5, "c": 1.0}),
        ({}, {}),
    ],
)
def test_what_a_check_may_return(groups_of: Groups, returned: Any, values: dict[str, float]) -> None:
    def f(_: Trajectory) -> Any:
        return returned

    scores, failures = checked(f, groups_of(1)[0].trajectories[0])
    assert ({score.name: score.value for score in scores}, failures) == (values, {})


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (math.nan, "returned nan"),
        (math.inf, "returned inf"),
        (1.5, "returned a number that is not in 0..1"),
        ("good", "returned str instead of a number"),
        ({"": 1.0}, "returned a dict with a key that is no name"),
    ],
)
def test_what_cannot_be_a_score_is_none_and_counted(groups_of: Groups, returned: Any, reason: str) -> None:
    def f(_: Trajectory) -> Any:
        return returned

    (group,) = groups_of(1, siblings=3)
    assert run_checks(group.trajectories, [make_check(f)]) == ((), {f"f: {reason}": 3})


def test_one_bad_key_does_not_cost_the_others(groups_of: Groups) -> None:
    def f(_: Trajectory) -> Any:
        return {"good": 0.5, "bad": math.nan}

    scores, failures = checked(f, groups_of(1)[0].trajectories[0])
    assert ([score.name for score in scores], failures) == (["good"], {"f: returned nan": 1})


def test_a_check_that_raises_costs_its_own_score_only(groups_of: Groups) -> None:
    def breaks(trajectory: Trajectory) -> float:
        if trajectory.id == "g0-1":
            raise KeyError("who")
        return 1.0

    (group,) = groups_of(1, siblings=3)
    scores, failures = run_checks(group.trajectories, [make_check(breaks), make_check(short)])
    assert [(s.trajectory_id, s.name) for s in scores] == [
        ("g0-0", "breaks"), ("g0-0", "short"), ("g0-1", "short"), ("g0-2", "breaks"), ("g0-2", "short"),
    ]  # fmt: skip
    assert failures == {"breaks: raised KeyError": 1}


def test_a_check_that_hangs_is_given_up(groups_of: Groups) -> None:
    release, runs = threading.Event(), []

    def hangs(trajectory: Trajectory) -> float:
        runs.append(trajectory.id)
        release.wait(60)
        return 1.0

    (group,) = groups_of(1, siblings=5)
    scores, failures = run_checks(group.trajectories, [make_check(hangs)], timeout_s=0.01)
    release.set()
    assert (scores, len(runs)) == ((), 3)
    assert failures == {"hangs: took longer than 0.01 s": 3, "hangs: not run, it had hung 3 times": 2}


def test_a_range_of_ones_own(groups_of: Groups) -> None:
    def f(_: Trajectory) -> float:
        return -1.0

    f.range = (-1, 1)  # type: ignore[attr-defined]
    scores, failures = checked(f, groups_of(1)[0].trajectories[0])
    assert ([score.value for score in scores], failures) == ([-1.0], {})
    for impossible in ((1, 0), "x", (0, math.nan), 3):
        f.range = impossible  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match="two numbers"):
            make_check(f)


def test_running_it_again_replaces_and_other_code_does_not(groups_of: Groups) -> None:
    run = groups_of(1)[0].trajectories[0]

    def first() -> Callable[[Trajectory], float]:
        def f(_: Trajectory) -> float:
            return 0.25

        return f

    def second() -> Callable[[Trajectory], float]:
        def f(_: Trajectory) -> float:
            return 0.75

        return f

    (one,), (again,), (other,) = (checked(f, run).scores for f in (first(), first(), second()))
    assert one.id == again.id != other.id
    assert one.rubric == again.rubric != other.rubric


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("my_evals", "broken_evals"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "my_evals.py").write_text(
        "THREE = 3\ndef polite(t):\n    return True\n"
        "class Suite:\n    @staticmethod\n    def exact(t):\n        return 0.5\n"
    )
    (tmp_path / "broken_evals.py").write_text("import nothing_like_that\n")
    return tmp_path


def test_checks_are_found_beside_the_job(here: Path) -> None:
    polite, exact = load_checks(["my_evals:polite", "my_evals:Suite.exact"])
    assert (polite.name, exact.name, isinstance(polite, Check)) == ("polite", "exact", True)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("my_evals", "module:function"),
        ("nowhere:f", "no module 'nowhere'"),
        ("broken_evals:f", "nothing_like_that"),
        ("my_evals:rude", "no function 'rude'"),
        ("my_evals:THREE", "no function 'THREE'"),
    ],
)
def test_a_check_that_cannot_be_loaded(here: Path, spec: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_checks([spec])


def test_two_checks_of_one_name(here: Path) -> None:
    with pytest.raises(ConfigError, match="rename one"):
        load_checks(["my_evals:polite", "my_evals:polite"])


def test_the_setting_is_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ART_PATCH_CHECKS", "my_evals:polite, my_evals:Suite.exact,")
    assert load_settings().checks == ("my_evals:polite", "my_evals:Suite.exact")
    assert load_settings(checks=["a:b"]).checks == ("a:b",)
    with pytest.raises(ConfigError, match=r"module:function.*ART_PATCH_CHECKS"):
        load_settings(checks="polite")
    with pytest.raises(ConfigError, match="ART_PATCH_REWARD"):
        load_settings(reward="best")
