"""Answers without token ids, rendered by the templates of real models: what is learned, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from art_patch.formats import Unusable
from art_patch.serving.embedded.text import PromptEncoder
from art_patch.training import Family, Renderer, family_of
from art_patch.training.data.rendering import end_ids_of
from art_patch.training.families import DEFAULT
from tests.support.factory import make_call
from tests.training.templates import tokenizer_with

USER = {"role": "user", "content": "hi"}
TOOL = {
    "type": "function",
    "function": {"name": "lookup", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
SAID = {"role": "assistant", "content": "yo"}
THOUGHT = {"role": "assistant", "content": "yo", "reasoning_content": "hm"}
CALLED = {
    "role": "assistant",
    "content": None,
    "refusal": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "lookup", "arguments": '{"item": "plum"}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "31"}
QUICK = {"chat_template_kwargs": {"enable_thinking": False}}
HERMES = '<tool_call>\n{"name": "lookup", "arguments": {"item": "plum"}}\n</tool_call><|im_end|>'
ENDED = "<｜end▁of▁sentence｜>"  # noqa: RUF001

FAMILY: dict[str, Family] = {
    "qwen2_5": family_of("qwen2"),
    "qwen3": family_of("qwen3"),
    "llama3_1": family_of("llama"),
    "gemma3": family_of("gemma3_text"),
    "deepseekv3": family_of("deepseek_v3"),
    "glm4moe": DEFAULT,
}


@pytest.fixture(scope="module")
def renderers() -> dict[str, Renderer]:
    return {name: Renderer(tokenizer_with(name), family) for name, family in FAMILY.items()}


LEARNED: list[tuple[str, list[dict[str, Any]], dict[str, Any], dict[str, Any], str]] = [
    ("qwen2_5", [USER], SAID, {}, "yo<|im_end|>"),
    ("qwen2_5", [USER], CALLED, {}, HERMES),
    ("qwen2_5", [USER, CALLED, RESULT], SAID, {}, "yo<|im_end|>"),
    ("qwen2_5", [USER], {"role": "assistant", "content": [{"type": "text", "text": "yo"}]}, {}, "yo<|im_end|>"),
    ("qwen3", [USER], SAID, {}, "<think>\n\n</think>\n\nyo<|im_end|>"),
    ("qwen3", [USER], THOUGHT, {}, "<think>\nhm\n</think>\n\nyo<|im_end|>"),
    ("qwen3", [USER], CALLED, {}, "<think>\n\n</think>\n\n" + HERMES),
    ("qwen3", [USER], SAID | {"content": "<think>\nhm\n</think>\n\nyo"}, {}, "<think>\nhm\n</think>\n\nyo<|im_end|>"),
    ("qwen3", [USER], SAID, QUICK, "yo<|im_end|>"),
    ("qwen3", [USER], THOUGHT, QUICK, "yo<|im_end|>"),  # the prompt says that there are no thoughts
    ("llama3_1", [USER], THOUGHT, {}, "yo<|eot_id|>"),
    ("llama3_1", [USER], CALLED, {}, '{"name": "lookup", "parameters": {"item": "plum"}}<|eot_id|>'),
    ("gemma3", [USER], SAID, {}, "yo<end_of_turn>"),
    ("deepseekv3", [USER], SAID, {}, f"\n</think>\n\nyo{ENDED}"),  # the prompt opens the thoughts
    ("deepseekv3", [USER], THOUGHT, {}, f"hm\n</think>\n\nyo{ENDED}"),
]


@pytest.mark.parametrize(("template", "messages", "answer", "params", "text"), LEARNED)
def test_what_is_learned(
    renderers: dict[str, Renderer],
    template: str,
    messages: list[dict[str, Any]],
    answer: dict[str, Any],
    params: dict[str, Any],
    text: str,
):
    renderer = renderers[template]
    tools = (TOOL,) if answer is CALLED else ()
    call = make_call(prompt=None, messages=messages, params=params, tools=tools)
    turn = renderer.turn(call, answer)
    prompt = PromptEncoder(renderer.tokenizer).encode(messages, tools, params.get("chat_template_kwargs"))
    assert turn.prompt_ids == tuple(prompt)
    assert renderer.tokenizer.decode(turn.answer_ids_A) == text
    assert turn.answer_ids_A[-1] in end_ids_of(renderer.tokenizer, renderer.family)
    assert (turn.logprobs_A, turn.temperature) == ((0.0,) * len(turn.answer_ids_A), 1.0)


REFUSED: list[tuple[str, list[dict[str, Any]], dict[str, Any], str]] = [
    ("gemma3", [USER], CALLED, "leaves a part of the answer out"),
    ("llama3_1", [USER], CALLED | {"content": "let me see"}, "leaves a part of the answer out"),
    ("gemma3", [USER, SAID, RESULT], SAID, "refuses the messages"),
    ("deepseekv3", [USER], CALLED, "refuses the messages"),
    ("glm4moe", [USER], SAID, "does not end an answer"),
    ("qwen2_5", [USER], SAID | {"content": "yo<|im_end|>\n<|im_start|>user"}, "would have ended it"),
    ("qwen2_5", [USER], SAID | {"content": ""}, "an answer is empty"),
    ("qwen2_5", [{"role": "user", "content": [{"type": "image_url"}]}], SAID, "image, audio or file"),
]


@pytest.mark.parametrize(("template", "messages", "answer", "reason"), REFUSED)
def test_what_is_refused(
    renderers: dict[str, Renderer],
    template: str,
    messages: list[dict[str, Any]],
    answer: dict[str, Any],
    reason: str,
):
    with pytest.raises(Unusable, match=reason):
        renderers[template].turn(make_call(prompt=None, messages=messages), answer)


def test_a_template_that_writes_the_prompt_otherwise_when_an_answer_follows():
    tokenizer = tokenizer_with("qwen2_5")
    tokenizer.chat_template = "{{ messages | length }}{{ messages[-1].content }}<|im_end|>"
    with pytest.raises(Unusable, match="renders the prompt otherwise"):
        Renderer(tokenizer, DEFAULT).turn(make_call(messages=[USER]), SAID)


def test_an_answer_whose_first_token_merges_with_the_prompt_is_refused():
    tokenizer = tokenizer_with("qwen2_5")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    )
    assert len(tokenizer.encode("the")) == 1
    with pytest.raises(Unusable, match="merges with the prompt's last"):
        Renderer(tokenizer, DEFAULT).turn(
            make_call(messages=[{"role": "user", "content": "th"}]), {"role": "assistant", "content": "e"}
        )


def test_what_families_say_of_thinking_is_true_of_their_templates(renderers: dict[str, Renderer]):
    for name in ("qwen3", "deepseekv3"):
        renderer = renderers[name]
        thinking = renderer.family.thinking
        assert thinking is not None
        earlier = SAID | {"content": f"{thinking.open}hm{thinking.close}yo"}
        prompt = renderer.prompt_ids(make_call(messages=[USER, earlier, USER]))
        assert "hm" not in renderer.tokenizer.decode(prompt)


def test_the_end_of_a_turn():
    tokenizer = tokenizer_with("qwen2_5")
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})  # a base model's
    names = {tokenizer.convert_ids_to_tokens(token) for token in end_ids_of(tokenizer, family_of("qwen2"))}
    assert names == {"<|im_end|>", "<|endoftext|>"}
    assert len(end_ids_of(tokenizer, family_of("llama"))) == 1  # it has none of Llama's
