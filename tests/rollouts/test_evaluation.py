"""Models side by side: means, limits, what raised, the table and the picture."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

import art_patch as art

MODELS = [art.Model(name=name, project="p", inference_base_url="http://127.0.0.1:9/v1") for name in ("old", "new")]


async def rollout(model: art.Model[Any], scenario: int) -> art.Trajectory:
    if model.name == "new" and scenario == 3:
        raise ValueError("no")
    better = 0.5 if model.name == "new" else 0.0
    return art.Trajectory(reward=scenario % 2 + better, metrics={"turns": scenario})


def evaluated(**more: Any) -> art.Evaluation:
    return asyncio.run(art.evaluate(rollout, range(12), MODELS, runs=2, pbar_desc=None, **more))


def test_scenarios_are_the_unit_and_differences_are_paired():
    old, new = evaluated(max_exceptions=2).models
    assert (old.model, old.runs, old.raised, old.better_by, old.at_least) == ("old", 24, 0, None, None)
    assert old.metrics["reward"].value == 0.5
    assert old.metrics["reward"].within == pytest.approx(1.96 * math.sqrt(12 / 44 / 12))  # 12 scenarios, not 24 runs
    assert (new.runs, new.raised, new.better_by, new.at_least) == (22, 2, 0.5, 0.5)
    assert list(new.metrics) == ["reward", "turns"]
    assert [len(group.trajectories) for group in new.groups] == [2, 2, 2, 0, *[2] * 8]


def test_one_that_raises_is_told_unless_it_may():
    with pytest.raises(ValueError, match="no"):
        evaluated()


def test_the_table_and_its_json_say_the_same():
    found = evaluated(max_exceptions=2)
    lines = found.table("reward").splitlines()
    assert lines[0].split() == ["model", "runs", "raised", "reward", "better", "by", "at", "least"]
    assert lines[2].split() == ["old", "24", "0", "0.5", "+-", "0.3"]
    assert lines[3].split()[:3] == ["new", "22", "2"] and lines[3].split()[-2:] == ["+0.5", "+0.5"]
    told = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert told["scenarios"] == 12 and told["models"][1]["better_by"] == 0.5
    one = asyncio.run(art.evaluate(rollout, [1], MODELS[:1], pbar_desc=None))
    assert one.to_json()["models"][0]["metrics"]["reward"] == {"mean": 1.0, "within": None}
    assert "+-" not in one.table("reward").splitlines()[2]


def test_the_picture_is_drawn_with_and_without_a_curve(tmp_path: Path):
    found = evaluated(max_exceptions=2)
    for name, more in (("bars.png", {}), ("sub/curve.png", {"curve": [(0, 0.1), (1, 0.5)], "title": "t"})):
        path = found.plot(tmp_path / name, **more)
        assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(art.ConfigError, match="no model has a metric 'wins'; there are: reward, turns"):
        found.plot(tmp_path / "x.png", metric="wins")


def test_mistakes_are_told():
    with pytest.raises(art.ConfigError, match="0 scenarios and 2 models"):
        asyncio.run(art.evaluate(rollout, [], MODELS))
    with pytest.raises(art.ConfigError, match="two models are named 'old'"):
        asyncio.run(art.evaluate(rollout, [1], [*MODELS, MODELS[0]]))
