"""The stand-in judge: the true judge client, prompt and parser against it, and the shop's rule."""

from __future__ import annotations

import gc
import json
import random
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from art_patch.demo.judge import STAND_IN_MODEL, serve_stand_in_judge, shop_rule
from art_patch.demo.shop import TOOLS, Task, is_success, make_tasks
from art_patch.rewards import Judge
from art_patch.types import Call, Choice, Group, Trajectory, TrajectoryInfo

# litellm leaves connections to the garbage collector when threads race for a client or its cache lets one go.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


@pytest.fixture(scope="module", autouse=True)
def collect_litellm_connections() -> Iterator[None]:
    """Collect them here, so that they do not turn up as another module's warning."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


TASK = make_tasks("traffic", 1, seed=3)[0]
OTHER = next(item for item in TASK.prices if item != TASK.item)


def lookup(item: str, call_id: str = "a", name: str = "lookup") -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps({"item": item})}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def result(task: Task, item: str, call_id: str = "a") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": str(task.prices[item])}


def said(text: str | None) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def with_arguments(arguments: str) -> dict[str, Any]:
    message = lookup(TASK.item)
    message["tool_calls"][0]["function"]["arguments"] = arguments
    return message


RIGHT_TURN = [lookup(TASK.item), result(TASK, TASK.item)]
BOTH_CALLS = {**lookup(TASK.item), "tool_calls": [*lookup(TASK.item)["tool_calls"], *lookup(OTHER, "b")["tool_calls"]]}

CASES: dict[str, tuple[list[dict[str, Any]], float]] = {
    "right lookup": ([lookup(TASK.item)], 1.0),
    "other item": ([lookup(OTHER)], 0.0),
    "other tool": ([lookup(TASK.item, name="buy")], 0.0),
    "two calls": ([BOTH_CALLS], 0.0),
    "text beside the call": ([{**lookup(TASK.item), "content": "let me see"}], 0.0),
    "arguments no JSON": ([with_arguments("{")], 0.0),
    "arguments too many": ([with_arguments(json.dumps({"item": TASK.item, "n": 1}))], 0.0),
    "answer without lookup": ([said(TASK.answer)], 0.0),
    "right answer": ([*RIGHT_TURN, said(TASK.answer)], 1.0),
    "right answer with a space": ([*RIGHT_TURN, said(f" {TASK.answer}")], 0.0),
    "wrong answer": ([*RIGHT_TURN, said(str(int(TASK.answer) + 1))], 0.0),
    "empty answer": ([*RIGHT_TURN, said("")], 0.0),
    "no answer": ([*RIGHT_TURN, said(None)], 0.0),
    "broken off at the result": (RIGHT_TURN, 0.0),
    "price of the other item": (
        [lookup(OTHER), result(TASK, OTHER), said(str(TASK.count * TASK.prices[OTHER]))],
        0.0,
    ),
    "bad call answered": ([lookup(TASK.item), {**result(TASK, TASK.item), "content": "bad call"}, said("0")], 0.0),
    "right after a detour": (
        [lookup(OTHER), result(TASK, OTHER), lookup(TASK.item, "b"), result(TASK, TASK.item, "b"), said(TASK.answer)],
        1.0,
    ),
    "nothing": ([], 0.0),
}


@pytest.mark.parametrize(("turns", "expected"), CASES.values(), ids=CASES)
def test_shop_rule(turns: list[dict[str, Any]], expected: float) -> None:
    assert shop_rule([*TASK.messages, *turns]) == expected
    assert shop_rule([{"role": "system", "content": "You keep a shop."}, *TASK.messages, *turns]) == expected


def test_shop_rule_knows_no_other_question() -> None:
    assert shop_rule([]) == 0.0
    assert shop_rule([{"role": "user", "content": "hello"}, said("hello")]) == 0.0


def test_shop_rule_agrees_with_the_shop_on_whole_runs() -> None:
    for task in make_tasks("traffic", 50, seed=1):
        for answer in (task.answer, str(task.count + task.prices[task.item]), "0"):
            run = [*task.messages, lookup(task.item), result(task, task.item), said(answer)]
            assert shop_rule(run) == float(is_success(task, run))


def test_the_true_judge_client_gets_the_rule_s_opinion_of_every_sibling() -> None:
    rng = random.Random(0)
    groups: list[Group] = []
    expected: dict[str, float] = {}
    for task in make_tasks("traffic", 5, seed=2):
        siblings: list[Trajectory] = []
        for i in range(6):
            name = f"{task.id}-{i}"
            answer = rng.choice([task.answer, "0", "1"])
            call_id = f"{rng.getrandbits(64):x}"
            prompt = [*task.messages, lookup(task.item, call_id), result(task, task.item, call_id)]
            call = Call("c", name, 0.0, "m", tuple(prompt), (Choice(0, said(answer)),), tools=tuple(TOOLS))
            siblings.append(Trajectory(TrajectoryInfo(name, 0.0), (call,)))
            expected[name] = float(answer == task.answer)
        groups.append(Group(task.id, task.id, "scenario_key", tuple(siblings)))
    with serve_stand_in_judge(shop_rule) as base_url:
        report = Judge(STAND_IN_MODEL, base_url=base_url).score_groups(groups)
    assert {score.trajectory_id: score.value for score in report.scores} == expected
    assert {score.judge for score in report.scores} == {STAND_IN_MODEL}
    assert report.calls == len(groups)
    assert report.prompt_tokens > 0 and report.completion_tokens > 0


def test_what_is_not_our_prompt_is_refused_and_the_port_is_free_afterwards() -> None:
    with serve_stand_in_judge(lambda messages: 1.0) as base_url:
        for body in ({}, {"messages": [{"role": "user", "content": "hi"}]}):
            request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), method="POST")
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(request, timeout=10)
            assert caught.value.code == 400
            assert b"stand-in judge" in caught.value.read()
            caught.value.close()
    port = int(base_url.split(":")[2].removesuffix("/v1"))
    with serve_stand_in_judge(lambda messages: 1.0, port=port) as again:
        assert again == base_url
