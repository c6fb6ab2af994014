"""The demo's world: the parts never overlap, tasks are the same for the same seed, and only the right thing counts."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import pytest

from art_patch.demo.shop import (
    COUNTS,
    ITEMS,
    PRICES,
    TOOLS,
    Part,
    Task,
    is_success,
    make_task,
    make_tasks,
    part_of,
    run_tool,
    traffic_prices,
    triples,
)

PARTS: tuple[Part, ...] = ("traffic", "evaluation")
TASK = Task(id="t", count=3, item="plum", prices={item: 4 if item == "plum" else 7 for item in ITEMS})


def transcript(arguments: str = '{"item": "plum"}', result: str = "4", final: str = "12") -> list[dict[str, Any]]:
    function = {"name": "lookup", "arguments": arguments}
    return [
        {"role": "user", "content": "price of 3 plum?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": result},
        {"role": "assistant", "content": final},
    ]


def test_parts_split_all_triples():
    every = [triple for part in PARTS for triple in triples(part)]
    assert len(every) == len(set(every)) == len(COUNTS) * len(ITEMS) * len(PRICES) == 768
    assert {part: len(triples(part)) for part in PARTS} == {"traffic": 613, "evaluation": 155}


def test_split_is_the_same_in_another_process():
    # A split by Python's own hash would differ: it is salted anew for every process.
    code = "from art_patch.demo.shop import triples; print(hash('x'), triples('evaluation'))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert other.split(" ", 1)[1].strip() == str(triples("evaluation"))


def test_every_product_and_every_question_is_in_traffic():
    assert {(count, price) for count, _, price in triples("traffic")} == {(c, p) for c in COUNTS for p in PRICES}
    assert all(traffic_prices(count, item) for count in COUNTS for item in ITEMS)


@pytest.mark.parametrize("part", PARTS)
def test_tasks_stay_in_their_part(part: Part):
    for task in make_tasks(part, 300, seed=5):
        assert part_of(task.count, task.item, task.prices[task.item]) == part
        assert set(task.prices) == set(ITEMS)
        others = {item: price for item, price in task.prices.items() if item != task.item}
        assert all(part_of(task.count, item, price) == "traffic" for item, price in others.items())


def test_tasks_are_determined_by_the_seed():
    assert make_tasks("traffic", 40, seed=1) == make_tasks("traffic", 40, seed=1)
    assert make_tasks("traffic", 40, seed=1) != make_tasks("traffic", 40, seed=2)
    assert make_tasks("traffic", 40, seed=1)[:10] == make_tasks("traffic", 10, seed=1)


def test_every_triple_comes_up_once_before_one_comes_up_again():
    tasks = make_tasks("evaluation", 310, seed=3)
    asked = [(task.count, task.item, task.prices[task.item]) for task in tasks]
    assert set(asked[:155]) == set(asked[155:]) == set(triples("evaluation"))
    assert len({task.id for task in tasks}) == 310


def test_id_tells_the_task():
    task = make_task((3, "plum", 4), random.Random(0))
    assert task.id.startswith(f"{part_of(3, 'plum', 4)}-3-plum-")
    assert task.question == "price of 3 plum?" and task.answer == "12"
    assert task.messages == [{"role": "user", "content": "price of 3 plum?"}]


def test_tool_answers_good_and_bad_calls():
    assert run_tool(TASK, "lookup", '{"item": "plum"}') == "4"
    assert run_tool(TASK, "lookup", {"item": "soap"}) == "7"
    assert run_tool(TASK, "lookup", '{"item": "moon"}') == "no such item"
    for name, arguments in [("buy", '{"item": "plum"}'), ("lookup", '{"item": 3}'), ("lookup", "{"), ("lookup", "[]")]:
        assert run_tool(TASK, name, arguments) == "bad call"


def test_tool_schema_is_json_in_the_servers_key_order():
    (tool,) = TOOLS
    assert json.loads(json.dumps(tool)) == tool
    assert list(tool) == ["type", "function"]
    assert list(tool["function"]) == ["name", "description", "parameters"]


def test_right_transcript_is_a_success():
    assert is_success(TASK, transcript())
    assert is_success(TASK, [{"role": "system", "content": "be brief"}, *transcript()])
    assert is_success(TASK, transcript(arguments='{"item":"plum"}'))


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param(transcript(final="7"), id="added instead"),
        pytest.param(transcript(final="12 "), id="a space too many"),
        pytest.param(transcript(final="012"), id="a digit too many"),
        pytest.param(transcript()[:3], id="stopped after the call"),
        pytest.param([*transcript()[:3], transcript()[1]], id="called again"),
        pytest.param([*transcript(), {"role": "user", "content": "sure?"}], id="went on"),
        pytest.param(transcript(result="bad call"), id="no number came back"),
        pytest.param(transcript(arguments='{"item": "soap"}'), id="other item"),
        pytest.param(transcript(arguments='{"item": "plum", "n": 1}'), id="extra argument"),
        pytest.param(transcript(arguments="{"), id="not JSON"),
        pytest.param([transcript()[0], transcript()[3]], id="guessed right without looking"),
        pytest.param(transcript()[1:], id="no question"),
        pytest.param([], id="empty"),
    ],
)
def test_anything_else_is_not(messages: list[dict[str, Any]]):
    assert not is_success(TASK, messages)


def test_success_needs_the_tasks_own_price():
    assert not is_success(TASK, transcript(result="5", final="15"))  # consistent, but of another price list
    assert not is_success(Task(id="t", count=2, item="plum", prices=TASK.prices), transcript())
