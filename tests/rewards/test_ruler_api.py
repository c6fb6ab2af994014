"""RULER as functions, over real HTTP."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from art_patch.errors import JudgeError
from art_patch.rewards import (
    DEFAULT_RUBRIC,
    Budget,
    rewards_G,
    ruler,
    ruler_score_group,
    ruler_score_group_sync,
    ruler_sync,
)

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

Serve = Callable[[Callable[[Any], Any]], Any]
JUDGE = "openai/some-judge"
LISTS = [
    [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": answer}] for answer in ("4", "5", "4", "")
]


@pytest.fixture(scope="module", autouse=True)
def collect_litellm_connections() -> Iterator[None]:
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def server(judge_server: Serve, reply: Any, verdict_text: Any) -> Any:
    """A judge that knows what 2 + 2 is."""
    return judge_server(
        lambda asked: reply(verdict_text({k: float(t[-1]["content"] == "4") for k, t in asked.transcripts.items()}))
    )


def test_message_lists_come_back_scored_in_their_order(server: Any) -> None:
    scores = asyncio.run(ruler(LISTS, JUDGE, base_url=server.base_url))
    assert [(s.trajectory_id, s.score) for s in scores] == [("1", 1.0), ("2", 0.0), ("3", 1.0), ("4", 0.0)]
    assert scores[0].explanation == "why 1.0"
    assert len(server.asked[0].ids) == 3  # the same list twice is judged once
    assert DEFAULT_RUBRIC.text.strip() in server.asked[0].body["messages"][0]["content"]


def test_arguments_in_arts_order_are_understood(server: Any) -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    asyncio.run(ruler(LISTS, JUDGE, {"api_base": server.base_url, "seed": 7, "api_key": "k"}, "Be right.", [tool]))
    asked = server.asked[0]
    assert asked.body["seed"] == 7
    assert "Be right." in asked.body["messages"][0]["content"]
    assert '"name": "add"' in asked.body["messages"][1]["content"]


def test_a_group_comes_back_with_a_score_on_each_sibling(server: Any, group_of: Any) -> None:
    group = group_of(LISTS)
    scored = asyncio.run(ruler_score_group(group, JUDGE, rubric="Be right.", base_url=server.base_url))
    assert scored is not None
    assert rewards_G(scored) == (1.0, 0.0, 1.0, 0.0)
    assert rewards_G(group) == (None,) * 4


def test_without_an_event_loop(server: Any, group_of: Any) -> None:
    assert [s.score for s in ruler_sync(LISTS, JUDGE, base_url=server.base_url)] == [1.0, 0.0, 1.0, 0.0]
    scored = ruler_score_group_sync(group_of(LISTS), JUDGE, base_url=server.base_url)
    assert scored is not None and rewards_G(scored) == (1.0, 0.0, 1.0, 0.0)


def test_no_lists_no_question(server: Any) -> None:
    assert asyncio.run(ruler([], JUDGE, base_url=server.base_url)) == []
    assert server.asked == []


def test_what_cannot_be_judged_is_an_error_or_none_and_never_a_zero(
    judge_server: Serve, reply: Any, group_of: Any
) -> None:
    server = judge_server(lambda asked: reply("all fine"))
    with pytest.raises(JudgeError, match="no valid verdict"):
        asyncio.run(ruler(LISTS, JUDGE, base_url=server.base_url))
    with pytest.raises(JudgeError, match="budget used up"):
        ruler_sync(LISTS, JUDGE, base_url=server.base_url, budget=Budget(max_calls=0))
    group = group_of(LISTS)
    assert asyncio.run(ruler_score_group(group, JUDGE, base_url=server.base_url, swallow_exceptions=True)) is None
    with pytest.raises(JudgeError, match="no judge is configured"):
        ruler_sync(LISTS, None)
