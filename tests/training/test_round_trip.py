"""Whether templates give back what was recorded, on templates of real models."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from art_patch.serving.embedded.text import PromptEncoder
from art_patch.training import Renderer, RoundTrips, check_round_trips, family_of
from art_patch.training.data.round_trip import Difference
from art_patch.training.families import DEFAULT
from art_patch.types import Call, Choice
from tests.support.factory import make_call, make_trajectory
from tests.training.templates import tokenizer_with

USER = {"role": "user", "content": "hi"}
AGAIN = {"role": "user", "content": "and?"}
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}
QWEN3 = family_of("qwen3")


@pytest.fixture(scope="module")
def qwen2() -> Any:
    return tokenizer_with("qwen2_5")


@pytest.fixture(scope="module")
def qwen3() -> Any:
    return tokenizer_with("qwen3")


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def sampled(tokenizer: Any, key: str, messages: list[dict[str, Any]], text: str, **changes: Any) -> Call:
    """A call as the embedded engine would have answered it, with the canonical tokens of `text`."""
    prompt = PromptEncoder(tokenizer).encode(
        messages, changes.get("tools"), changes.get("params", {}).get("chat_template_kwargs")
    )
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    message = changes.pop("message", None) or said(text.removesuffix("<|im_end|>"))
    choice = Choice(0, message, "stop", ids, (-0.5,) * len(ids))
    return make_call(key, prompt=prompt, messages=messages, choices=(choice,), **changes)


def check(tokenizer: Any, *calls: Call, **options: Any) -> RoundTrips:
    return check_round_trips([make_trajectory("t", *calls)], tokenizer, **options)


def test_what_the_template_gives_back_is_exact(qwen2: Any):
    first = sampled(qwen2, "a", [USER], "yo<|im_end|>")
    second = sampled(qwen2, "b", [USER, said("yo"), AGAIN], "bye<|im_end|>")
    upstream = make_call("u", prompt=None, untrainable="answered by upstream")
    assert check(qwen2, first, upstream, second) == RoundTrips(
        calls=2, unchecked=0, exact=2, engines={"embedded": 2, "vllm": 2}, differences={}, examples=()
    )


def test_another_prompt_is_shown_where_it_begins_to_differ(qwen2: Any):
    other = sampled(qwen2, "a", [{"role": "system", "content": "Today: 1"}, USER], "yo<|im_end|>")
    found = check(qwen2, replace(other, messages=({"role": "system", "content": "Today: 2"}, USER)))
    assert (found.exact, found.engines) == (0, {"embedded": 0, "vllm": 0})
    (difference,) = found.examples
    assert (difference.kind, difference.call_id) == ("the prompt is rendered otherwise", "a")
    assert "".join(difference.before).endswith("Today: ")
    assert (difference.recorded[0], difference.rendered[0]) == ("1", "2")
    assert difference.recorded[1:] == difference.rendered[1:]


def test_template_arguments_of_the_call_are_respected(qwen3: Any):
    quick = {"chat_template_kwargs": {"enable_thinking": False}}
    call = sampled(qwen3, "a", [USER], "yo<|im_end|>", params=quick)
    assert check(qwen3, call).exact == 1
    assert check(qwen3, replace(call, params={})).differences == {"the prompt is rendered otherwise": 1}


def test_either_engines_prompt_is_exact(qwen2: Any):
    call = make_call(messages=[USER], tools=(TOOL,))
    prompts = {engine: Renderer(qwen2, DEFAULT, engine).prompt_ids(call) for engine in ("embedded", "vllm")}
    assert prompts["embedded"] != prompts["vllm"]  # vLLM writes `"description": null`
    answer = tuple(qwen2.encode("yo<|im_end|>"))
    for engine, prompt in prompts.items():
        found = check(qwen2, make_call(prompt=prompt, answer=answer, messages=[USER], tools=(TOOL,)))
        assert (found.exact, found.engine) == (1, engine)


def test_tokens_that_their_text_does_not_lead_back_to(qwen2: Any):
    call = sampled(qwen2, "a", [USER], "the")
    ids = tuple(qwen2.convert_tokens_to_ids(letter) for letter in "the")
    call = replace(call, choices=(Choice(0, said("the"), "stop", ids, (-0.5,) * 3),))
    (difference,) = check(qwen2, call).examples
    assert difference == Difference(
        "the text encodes otherwise",
        "a",
        len(call.prompt_token_ids or ()),
        before=difference.before,
        recorded=("t", "h", "e"),
        rendered=("the",),
    )
    assert "".join(difference.before).endswith("assistant\n")


def test_half_a_character_is_shown_by_its_number(qwen2: Any):
    whole = qwen2.encode("é")
    call = sampled(qwen2, "a", [USER], "x")
    call = replace(call, choices=(Choice(0, said("\ufffd"), "length", (whole[0],), (-0.5,)),))
    (difference,) = check(qwen2, call).examples
    assert difference.recorded == (f"#{whole[0]}",)


def test_thinking_that_is_stripped_from_history_is_told_from_other_rewriting(qwen3: Any):
    thought = "<think>\nhm\n</think>\n\nyo"
    first = sampled(qwen3, "a", [USER], f"{thought}<|im_end|>")
    second = sampled(qwen3, "b", [USER, said(thought), AGAIN], "<think>\n\n</think>\n\nbye<|im_end|>")
    found = check(qwen3, first, second, family=QWEN3)
    assert (found.exact, found.differences) == (1, {"thinking was stripped from history": 1})
    (difference,) = found.examples
    assert (difference.call_id, difference.recorded[0], difference.rendered[0]) == ("b", "<think>", "y")
    # an answer in the same turn of the user keeps its thoughts
    tool = {"role": "tool", "tool_call_id": "1", "content": "31"}
    third = sampled(qwen3, "c", [USER, said(thought), tool], "<think>\n\n</think>\n\nbye<|im_end|>")
    assert check(qwen3, first, third, family=QWEN3).exact == 2


def test_a_tool_call_that_is_written_anew(qwen2: Any):
    text = '<tool_call>\n{"name": "lookup", "arguments": {"item":"plum"}}\n</tool_call>'
    function = {"name": "lookup", "arguments": '{"item":"plum"}'}
    message = said("", tool_calls=[{"id": "1", "type": "function", "function": function}])
    first = sampled(qwen2, "a", [USER], f"{text}<|im_end|>", message=message)
    result = {"role": "tool", "tool_call_id": "1", "content": "31"}
    found = check(qwen2, first, sampled(qwen2, "b", [USER, message, result], "31<|im_end|>"))
    assert found.differences == {"history was rendered otherwise": 1}
    assert "".join(found.examples[0].before).endswith('{"item":')


def test_a_call_that_goes_on_from_nothing_has_no_history(qwen2: Any):
    alone = sampled(qwen2, "b", [AGAIN, said("x"), USER], "bye<|im_end|>")
    assert check(qwen2, sampled(qwen2, "a", [USER], "yo<|im_end|>"), alone).exact == 2


def test_what_the_template_refuses():
    gemma = tokenizer_with("gemma3")
    call = make_call("a", prompt=(1, 2), answer=tuple(gemma.encode("yo")), messages=[said("first?"), USER])
    found = check(gemma, call)
    assert found.differences["the prompt cannot be rendered"] == 1
    assert found.examples[0] == Difference("the prompt cannot be rendered", "a", 0)


def test_a_sample_is_spread_over_all(qwen2: Any):
    good = [sampled(qwen2, f"g{n}", [USER], "yo<|im_end|>") for n in range(30)]
    bad = [replace(call, id=f"b{n}", messages=(AGAIN,)) for n, call in enumerate(good)]
    found = check(qwen2, *good, *bad, limit=10)
    assert (found.calls, found.unchecked, found.exact) == (10, 50, 5)
    assert len(found.examples) == 5


def test_it_reads_well_and_is_json(qwen2: Any):
    call = sampled(qwen2, "a", [{"role": "user", "content": "1"}], "yo<|im_end|>")
    found = check(qwen2, replace(call, messages=({"role": "user", "content": "2"},)))
    assert found.as_text().splitlines() == [
        "0 of 1 calls are what the chat template makes of them",
        "     1  the prompt is rendered otherwise",
        f"the prompt is rendered otherwise: call a, token {found.examples[0].place}",
        f"  before   {' '.join(map(repr, found.examples[0].before))}",
        "  recorded '1' '<|im_end|>' '\\n' '<|im_start|>' 'as' 'sist'",
        "  rendered '2' '<|im_end|>' '\\n' '<|im_start|>' 'as' 'sist'",
    ]
    assert json.loads(json.dumps(found.metrics()))["differences"] == {"the prompt is rendered otherwise": 1}
