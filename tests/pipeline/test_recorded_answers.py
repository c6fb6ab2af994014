"""A repeated run's calls get the answers that were recorded, over the real SDK and its HTTP library."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import permutations
from typing import Any

import pytest

from art_patch.replay.worker import OtherWay, RecordedAnswers
from art_patch.trajectories import prompt_key


def asked(text: str, **more: Any) -> bytes:
    return json.dumps({"model": "agent@0", "messages": [{"role": "user", "content": text}], **more}).encode()


def given(*texts: str, turn: str, later: tuple[str, ...] = ()) -> dict[str, Any]:
    answers = [
        [prompt_key([{"role": "user", "content": text}], ()), [choice(f"{text}, {place}")]]
        for place, text in enumerate(texts)
    ]
    after = [prompt_key([{"role": "user", "content": text}], ()) for text in (turn, *later)]
    return {"answers": answers, "turn": after[0], "later": after[1:]}


def choice(text: str) -> dict[str, Any]:
    return {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}


def said(body: bytes | None) -> Any:
    return None if body is None else json.loads(body)["choices"][0]["message"]["content"]


@pytest.mark.parametrize("order", list(permutations(["a", "a", "b", "turn"])))
def test_calls_are_recognised_in_any_order(order: tuple[str, ...]):
    answers = RecordedAnswers(given("a", "a", "b", turn="turn"))
    got = [said(answers.to(asked(text))) for text in order]
    assert [each for text, each in zip(order, got, strict=True) if text == "a"] == ["a, 0", "a, 1"]
    assert [each for text, each in zip(order, got, strict=True) if text == "b"] == ["b, 2"]
    assert (answers.reached, answers.strayed) == (True, False)
    assert answers.to(asked("anything")) is None  # from the turn on, a policy answers


def test_another_prompt_before_the_turn_stops_the_run():
    for other in (asked("else"), asked("turn", tools=[{"type": "function"}]), b"{}"):
        answers = RecordedAnswers(given("a", turn="turn"))
        assert said(answers.to(asked("a"))) == "a, 0"
        with pytest.raises(OtherWay):
            answers.to(other)
        with pytest.raises(OtherWay):  # the app caught it
            answers.to(asked("turn"))
        assert answers.strayed


def test_a_parallel_call_may_come_before_the_turn_after_which_it_was_recorded():
    answers = RecordedAnswers(given("a", turn="turn", later=("beside",)))
    assert answers.to(asked("beside")) is None  # by a policy, as all that follows
    assert (answers.reached, answers.strayed) == (False, False)
    assert answers.to(asked("what the policy said to that")) is None
    assert said(answers.to(asked("a"))) == "a, 0"
    assert (answers.to(asked("turn")), answers.reached, answers.strayed) == (None, True, False)


def test_a_run_from_its_start_is_left_alone():
    answers = RecordedAnswers(None)
    assert (answers.to(asked("a")), answers.reached, answers.strayed) == (None, True, False)


SCRIPT = """
import asyncio, json, sys
import openai
import art_patch as art
from art_patch.replay.worker import Intercepted, RecordedAnswers
from art_patch.trajectories import prompt_key

url, store, home = sys.argv[1:]
given = dict(base_url="http://127.0.0.1:9/v1", api_key="sk-x", max_retries=0)
client, later = openai.OpenAI(**given), openai.AsyncOpenAI(**given)
art.patch(project="agent", store=store, home=home, base_url=url, mode="route")
messages = [{"role": "user", "content": "look it up"}]
tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
call = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
message = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
answers = [[prompt_key(messages, tools), [{"index": 0, "message": message, "finish_reason": "tool_calls"}]]] * 5
spoken = {"index": 0, "message": {"role": "assistant", "content": "hm"}, "finish_reason": "stop"}
plain = [[prompt_key(messages, ()), [spoken]]] * 5
said = {"role": "assistant", "content": ""}
nothing = [{"role": "user", "content": "say nothing"}]
empty = [[prompt_key(nothing, ()), [{"index": 0, "message": said, "finish_reason": "stop"}]]] * 2
intercepted = Intercepted()
intercepted.answers = RecordedAnswers({"answers": answers + plain + empty, "turn": "x", "later": []})
kwargs = dict(model="m", messages=messages)


def seen(message):
    return [message.content, [(one.id, one.function.name, one.function.arguments) for one in message.tool_calls or ()]]


def joined(chunks):
    parts = [part for chunk in chunks for choice in chunk.choices for part in choice.delta.tool_calls or ()]
    return ["".join(c.delta.content or "" for chunk in chunks for c in chunk.choices), chunks[-1].usage is not None,
            [(one.id, one.function.name, one.function.arguments, one.index) for one in parts]]


async def main():
    one = await later.chat.completions.create(**kwargs, tools=tools)
    stream = await later.chat.completions.create(**kwargs, tools=tools, stream=True)
    return [seen(one.choices[0].message), joined([chunk async for chunk in stream])]

usage = {"stream_options": {"include_usage": True}}
print(json.dumps([
    seen(client.chat.completions.create(**kwargs, tools=tools).choices[0].message),
    joined(list(client.chat.completions.create(**kwargs, tools=tools, stream=True, **usage))),
    asyncio.run(main()),
    client.chat.completions.with_raw_response.create(**kwargs).parse().model,
    client.responses.create(model="m", input="look it up", store=False).output_text,
    client.chat.completions.create(model="m", messages=nothing).choices[0].message.content,
    joined(list(client.chat.completions.create(model="m", messages=nothing, stream=True))),
    [event.type for event in client.responses.create(model="m", input="look it up", store=False, stream=True)][-1],
]))
art.flush()
"""


@pytest.mark.slow
def test_the_sdk_takes_them_for_an_engines_answers(place: Any, tmp_path: Any):
    url = f"{place.client.base_url}/v1"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, url, place.url, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    whole, streamed, (later, later_streamed), model, response, *nothing, last = json.loads(done.stdout)
    assert whole == later == [None, [["t1", "look", "{}"]]]
    assert streamed == ["", True, [["t1", "look", "{}", 0]]]
    assert later_streamed == ["", False, [["t1", "look", "{}", 0]]]
    assert (model, response, nothing, last) == ("m", "hm", ["", ["", False, []]], "response.completed")
    from tests.support.spooled import taken_over

    taken_over(place.url, "agent")
    assert place.store.read.recent(limit=10) == ()  # what was recorded once is not recorded again
