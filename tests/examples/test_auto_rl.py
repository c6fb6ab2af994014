"""Scenarios of examples/auto_rl: written by a model, checked, kept; and its stand-ins."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.examples.load import load
from tests.support.servers import Answer, StubServer, completion, no_certificates, serving

example = load("auto_rl", "scenarios", "stand_in")
scenarios, stand_in = example.scenarios, example.stand_in

TASK = "name rivers"


@pytest.fixture
def helper(tmp_path: Path) -> Iterator[StubServer]:
    with no_certificates(tmp_path), serving() as server:
        yield server


def told(text: str) -> Answer:
    return Answer(body=json.dumps(completion({"model": "m"}, content=text)).encode())


def write(url: str, file: Path, task: str = TASK, **more: Any):
    async def written():
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await scenarios.write_scenarios(client, "m", task, file=file, **{"count": 3, **more})

    return asyncio.run(written())


def test_scenarios_are_written_once(helper: StubServer, tmp_path: Path):
    file = tmp_path / "s.json"
    helper.will(told('Sure:\n```json\n["A?", "a ?", "", "B?"]\n```'), told('[{"text": "C?"}, "D?"]'))
    found = write(helper.url, file)
    assert (found.task, found.written_by, found.system_prompt) == (TASK, "m", "Name rivers.")
    assert found.questions == ("A?", "B?", "C?")
    assert len(helper.seen) == 2
    assert '["A?", "B?"]' in helper.seen[1].body["messages"][0]["content"]
    assert write(helper.url, file) == found
    assert len(helper.seen) == 2


def test_a_failure_keeps_what_was_written(helper: StubServer, tmp_path: Path):
    file = tmp_path / "s.json"
    helper.will(told('["A?"]'), *[told("I cannot do that [today].")] * 3, told('["B?", "C?"]'))
    with pytest.raises(ValueError, match=r"1 of 3 scenarios.*--count"):
        write(helper.url, file)
    assert write(helper.url, file).questions == ("A?", "B?", "C?")


def test_the_helper_writes_the_prompt_if_it_is_asked_to(helper: StubServer, tmp_path: Path):
    helper.will(told(" You name rivers. \n"), told('["A?", "B?", "C?"]'))
    assert write(helper.url, tmp_path / "s.json", own_prompt=True).system_prompt == "You name rivers."


def test_a_file_of_another_task_is_refused(helper: StubServer, tmp_path: Path):
    helper.will(told('["A?", "B?", "C?"]'))
    write(helper.url, tmp_path / "s.json")
    with pytest.raises(ValueError, match="--scenarios"):
        write(helper.url, tmp_path / "s.json", task="name lakes")


def test_some_are_held_out_and_never_learned_from():
    questions = tuple(f"What about {n}?" for n in range(100))
    found = scenarios.Scenarios(TASK, "m", "", questions)
    assert 10 <= len(found.held_out()) <= 40
    assert sorted([*found.held_out(), *found.to_learn_from()]) == sorted(questions)
    assert set(found.lessons(20, "1")) < set(found.to_learn_from())
    assert found.lessons(20, "1") == found.lessons(20, "1") != found.lessons(20, "2")
    assert scenarios.Scenarios(TASK, "m", "", ("What about 1 ?",)).held_out() == [
        each.replace("1?", "1 ?") for each in found.held_out() if each == "What about 1?"
    ]


def test_the_stand_in_helper_is_read_as_a_real_one(tmp_path: Path):
    with no_certificates(tmp_path), stand_in.serve_helper() as url:
        found = write(url, tmp_path / "s.json", count=60)
    assert len(set(found.questions)) == 60
    assert len(found.held_out()) >= 8


def test_the_stand_in_judge_goes_by_point_tone_and_length():
    asked = "What does shipping to Norway cost?"
    answers = [
        "Gladly! Shipping costs nine euros.",
        "Read our terms. Shipping costs nine euros.",
        "Gladly! Shipping costs nine euros." + " And so on and on." * 5,
        "Gladly! It takes four days.",
        "",
    ]
    assert [stand_in.rule(asked, answer) for answer in answers] == [1.0, 0.6, 0.6, 0.0, 0.0]


def test_the_tiny_base_knows_no_other_questions():
    with pytest.raises(ValueError, match="--base-model"):
        stand_in.tiny(0, "Name rivers.", ["The longest?"])
