"""What a coroutine asks becomes histories: one goes on, a branch or other tools begin another."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

import art_patch as art
from art_patch.rollouts.client import capture
from tests.support.scripted import choice
from tests.support.servers import serving

FIRST = {"role": "user", "content": "hi"}
SECOND = {"role": "user", "content": "and then?"}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def answered(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


async def agent() -> None:
    """Two turns, another try at the second, the first again with tools."""
    capture([FIRST], choice("one"), None)
    capture([FIRST, answered("one"), SECOND], choice("two"), None)
    capture([FIRST, answered("one"), SECOND], choice("other"), None)
    capture([FIRST], choice("three"), TOOLS)
    art.auto_trajectory(required=True).reward = 1.0


def test_conversations_branch_and_go_on():
    found = asyncio.run(art.capture_auto_trajectory(agent()))
    assert found.reward == 1.0
    assert "duration" in found.metrics
    assert [(history.messages(), history.tools) for history in found.histories()] == [
        ([FIRST, answered("one"), SECOND, answered("two")], None),
        ([FIRST, answered("one"), SECOND, answered("other")], None),
        ([FIRST, answered("three")], TOOLS),
    ]
    assert len(found.choices()) == 4


def test_it_is_the_current_trajectory_there_and_nowhere_else():
    async def look() -> None:
        assert art.current_trajectory() is art.auto_trajectory(required=True)

    found = asyncio.run(art.capture_auto_trajectory(look()))
    assert math.isnan(found.reward)
    assert art.auto_trajectory() is None
    assert art.current_trajectory() is None
    with art.trajectory() as run:
        assert art.current_trajectory() == run
    with pytest.raises(art.ConfigError, match="capture_auto_trajectory"):
        art.auto_trajectory(required=True)
    capture([FIRST], choice(), None)  # nobody listens


def test_one_that_raises_takes_its_trajectory_along():
    async def breaks() -> None:
        capture([FIRST], choice("one"), None)
        raise ValueError("no")

    async def group() -> art.TrajectoryGroup:
        return await art.TrajectoryGroup([art.capture_auto_trajectory(breaks())])

    (failure,) = asyncio.run(group()).exceptions
    assert failure.trajectory is not None
    assert failure.trajectory.messages() == [FIRST, answered("one")]


def test_an_answer_that_is_asked_for_raw_is_captured():
    async def reads_headers(url: str) -> None:
        model = art.Model(name="big", project="compare", inference_base_url=url)
        asked: Any = [FIRST]
        raw = await model.openai_client().chat.completions.with_raw_response.create(model="big", messages=asked)
        assert raw.status_code == 200
        assert raw.parse().choices[0] is art.auto_trajectory(required=True).choices()[0]

    with serving() as server:
        found = asyncio.run(art.capture_auto_trajectory(reads_headers(server.url)))
    assert found.messages() == [FIRST, answered("Hello there!")]
