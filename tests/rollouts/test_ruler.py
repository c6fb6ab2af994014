"""A group of rollouts ranked by the judge: its scores are the rewards."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

import art_patch as art
from art_patch.demo.judge import STAND_IN_MODEL, serve_stand_in_judge
from art_patch.rewards import ruler_score_group
from tests.support.scripted import choice

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

USER: Any = {"role": "user", "content": "2 + 2?"}


@pytest.fixture(scope="module", autouse=True)
def collect_litellm_connections() -> Iterator[None]:
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


async def rollout(said: str, reward: float) -> art.Trajectory:
    return art.Trajectory(messages_and_choices=[USER, choice(said)], reward=reward, metrics={"turns": 1})


def test_a_group_is_ranked_as_soon_as_it_is_there():
    async def ranked(url: str) -> list[art.TrajectoryGroup]:
        return await art.gather_trajectory_groups(
            [art.TrajectoryGroup([rollout("4", 0.5), rollout("5", 0.25)], metadata={"game": 1})],
            pbar_desc=None,
            after_each=lambda group: ruler_score_group(group, STAND_IN_MODEL, base_url=url, api_key="none"),
        )

    with serve_stand_in_judge(lambda messages: float(messages[-1]["content"] == "4")) as url:
        (group,) = asyncio.run(ranked(url))
    assert isinstance(group, art.TrajectoryGroup)
    assert [(run.reward, run.metrics, len(run.choices())) for run in group] == [
        (1.0, {"turns": 1, "completion_tokens": 2, "independent_reward": 0.5, "ruler_score": 1.0}, 1),
        (0.0, {"turns": 1, "completion_tokens": 2, "independent_reward": 0.25, "ruler_score": 0.0}, 1),
    ]
    assert group.metadata == {"game": 1}
    assert group.trajectories[0].logs[0].startswith("RULER: ")
