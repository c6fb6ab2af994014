"""`art-patch policies show`: the origin of a policy, on a store that holds two updates."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from art_patch._lib.ids import new_id
from art_patch.insights.policy_story import time_in_states
from art_patch.store import open_store
from art_patch.training import TrainConfig
from art_patch.types import Call, Choice, Group, Policy, Score, TrainedRow, Trajectory, TrajectoryInfo
from tests.support.command_line import art_patch, says

DAY_S = 86_400.0


def sibling(key: str) -> Trajectory:
    answer = (Choice(0, {"role": "assistant", "content": "yes"}, "stop"),)
    call = Call(f"{key}-call", key, 1.0, "m", ({"role": "user", "content": "SECRET"},), answer, policy="agent@0")
    return Trajectory(TrajectoryInfo(key, 1.0), (call,))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """`agent@1`, of an older release, is retired; `agent@2`, made of it, serves since a day."""
    now = time.time()
    store = open_store(f"sqlite:///{tmp_path}/default/store.db")
    base = store.ledger.add_base("agent@0", "/models/base", "ff" * 32, who="ada", now=now - 9 * DAY_S)
    runs = [sibling("run-1"), sibling("run-2")]
    store.write([each for run in runs for each in (run.info, *run.calls)])
    store.ledger.add_groups([Group("group-1", "task:plums", "same_task", tuple(runs))], state="scored")
    by: dict[str, Any] = {"group_id": "group-1", "judge": "openai/judge", "rubric": "abc123"}
    store.write([Score(new_id(), run.id, "ruler", 0.5, "ruler", 2.0, **by) for run in runs])
    old = Policy("agent@1", base.base, base.base_sha256, "candidate", now - 5 * DAY_S, "/a/agent@1", "agent@0")
    store.ledger.add_candidate(old, trained_on=["group-0"], who="ada")
    metrics = {
        "train": {"config": asdict(TrainConfig(learning_rate=0.5, seed=7)), "loss": 0.25, "history": [{"loss": 1.0}]},
        "made": {"art_patch": "0.1.0", "judges": [{"judge": "openai/judge", "rubric": "abc123"}]},
        "gate": {"candidate": 0.75, "champion": 0.5, "lower_bound": 0.0625, "scenarios": 9, "judge": "openai/gate"},
    }
    new = Policy("agent@2", base.base, base.base_sha256, "candidate", now - 2 * DAY_S, "/a/agent@2", "agent@1", metrics)
    rows = [TrainedRow("run-1-call", 0, "run-1", "group-1", 0.5, 1.0)]
    store.ledger.add_candidate(new, trained_on=["group-1"], also=["run-9"], rows=rows, who="ada")
    store.ledger.move("agent@1", "champion", who="ada", reason="first", now=now - 4 * DAY_S)
    store.ledger.move("agent@2", "champion", who="bob", reason="won its gate", now=now - DAY_S)
    store.close()
    return tmp_path


def test_a_policy_says_where_it_comes_from(home: Path):
    told = json.loads(art_patch("policies", "show", "agent@2", "--json", home=home).stdout)
    assert (told["parents"], told["children"]) == (["agent@1", "agent@0"], [])
    learned = told["learned"]
    assert (learned["groups"], learned["runs"], learned["alone"]) == (["group-1"], ["run-1"], 1)
    assert learned["judges"] == [["openai/judge", "abc123"]]
    assert told["made"]["art_patch"] == "0.1.0"
    assert [move["to_state"] for move in told["history"]] == ["champion", "candidate"]
    assert told["served_s"]["champion"] == pytest.approx(DAY_S, abs=600)
    assert told["metrics"]["train"]["config"]["seed"] == 7


def test_it_reads_well_in_80_columns(home: Path):
    shown = art_patch("policies", "show", "agent@2", home=home, COLUMNS="80").stdout
    assert max(map(len, shown.splitlines())) <= 80
    flat = " ".join(shown.split())
    for words in (
        "agent@2 champion", "agent@1 < agent@0", "1 group, 1 of its runs is in the store, and 1 run in no group",
        "openai/judge, rubric abc123", "seed 7", "learning_rate 0.5", "0.750 against 0.500", "judge openai/gate",
        "24 h as champion", "candidate -> champion, by bob", "won its gate", "; art_patch 0.1.0", "loss 0.25",
    ):  # fmt: skip
        assert words in flat
    assert "SECRET" not in shown


def test_what_an_older_release_did_not_keep_is_named(home: Path):
    shown = " ".join(art_patch("policies", "show", "agent@1", home=home).stdout.split())
    assert "art_patch's version is not on record" in shown
    assert "1 group is erased" in shown
    for name in ("judge", "seed", "settings", "training"):
        assert f"{name} not on record" in shown
    assert "no gate has tested it" in shown
    assert "children agent@2" in shown


def test_the_base_has_no_parent_and_an_unknown_policy_is_an_error(home: Path):
    shown = art_patch("policies", "show", "agent@0", home=home).stdout
    assert "none: it is the base model" in shown
    assert "judge" not in shown
    says(art_patch("policies", "show", "agent@7", home=home), 19, "agent@7", "art-patch policies")


def test_time_is_that_between_two_moves():
    moves = [
        {"to_state": "champion", "at": 50.0},
        {"to_state": "retired", "at": 40.0},
        {"to_state": "champion", "at": 30.0},
    ]
    assert time_in_states(moves, 60.0) == {"champion": 20.0, "retired": 10.0}
    assert time_in_states([], 60.0) == {}
