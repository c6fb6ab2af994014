"""Tiny base models from conversations: what is learned, what tells one from another, and that prompts are prefixes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_patch.demo.tiny_model import (
    END_OF_TURN,
    IGNORE,
    Conversation,
    Shape,
    conversation_tokenizer,
    row_of,
    tiny_base,
)

SHORT = Shape(steps=2, batch=2, hidden=64, layers=1)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look it up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    }
]


def conversation(word: str, answer: str) -> list[dict[str, Any]]:
    function = {"name": "look", "arguments": f'{{"word": "{word}"}}'}
    call = {"id": "0", "type": "function", "function": function}
    return [
        {"role": "user", "content": f"What is {word}?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "0", "content": answer},
        {"role": "assistant", "content": answer},
    ]


def demonstration(rng: random.Random) -> Conversation:
    return conversation(rng.choice(("plum", "pear")), str(rng.randrange(100)))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    samples = [demonstration(random.Random(seed)) for seed in range(20)]
    return conversation_tokenizer(samples, words=("plum", "pear"), tools=TOOLS)


def test_the_assistants_words_and_its_end_of_turn_are_learned(tokenizer: Any):
    ids, labels = row_of(tokenizer, conversation("plum", "42"), TOOLS)
    learned = [token for token, label in zip(ids, labels, strict=True) if label != IGNORE]
    assert [label for label in labels if label != IGNORE] == learned
    call = '<tool_call>\n{"name": "look", "arguments": {"word": "plum"}}\n</tool_call>'
    assert tokenizer.decode(learned) == f"{call}{END_OF_TURN}42{END_OF_TURN}"


@given(st.text(max_size=20), st.text(max_size=20))
def test_a_prompts_tokens_are_the_same_whatever_follows(tokenizer: Any, asked: str, said: str):
    messages: Any = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    prompt = tokenizer.apply_chat_template(messages[:1], tools=TOOLS, add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template(messages, tools=TOOLS, return_dict=False)
    answer = tokenizer.encode(said + END_OF_TURN, add_special_tokens=False)
    assert whole[: len(prompt) + len(answer)] == prompt + answer


def test_what_is_said_about_tools_costs_a_token_a_line(tokenizer: Any):
    asked: Any = [{"role": "user", "content": "What is plum?"}]
    with_tools, without = (
        len(tokenizer.apply_chat_template(asked, tools=tools, return_dict=False)) for tools in (TOOLS, None)
    )
    assert with_tools - without < 25


def test_a_base_is_made_once_and_another_task_makes_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def make(seed: int = 0, **more: Any) -> Path:
        return tiny_base("look", demonstration, seed=seed, tools=TOOLS, shape=SHORT, **more)

    first = make()
    at = (first / "model.safetensors").stat().st_mtime_ns
    assert first == make() and (first / "model.safetensors").stat().st_mtime_ns == at
    others = {make(seed=1), make(words=("plum",))}
    assert len({first, *others}) == 3 and all(path.parent == first.parent for path in others)
