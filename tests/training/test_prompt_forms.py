"""The forms in which engines hand messages to the template, against the engines' own code."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_patch.formats import Unusable
from art_patch.serving.embedded.text import PromptEncoder
from art_patch.training import Renderer
from art_patch.training.data.rendering import FORMS, content_text, template_arguments
from art_patch.training.families import DEFAULT
from art_patch.types import Call
from tests.support.engines import vllm_python
from tests.support.factory import make_call
from tests.support.tiny import make_tokenizer

TOOL = {"type": "function", "function": {"parameters": {"type": "object"}, "name": "f", "strict": True, "extra": 1}}
CALLS = [
    {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
    for text in ('{"b": 1, "a": 2}', "[1]", "{broken", "")
]

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5)
parts = st.lists(st.builds(lambda text: {"type": "text", "text": text}, texts), min_size=1, max_size=3)
spoken = st.builds(
    lambda role, content, extra: {"role": role, "content": content, **extra},
    st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
    texts | parts,
    st.sampled_from([{}, {"name": "x"}, {"tool_calls": None}, {"tool_calls": []}, {"reasoning": "hm"}]),
)
called = st.builds(
    lambda content, calls: {"role": "assistant", "content": content, "tool_calls": calls, "refusal": None},
    texts | st.none(),
    st.lists(st.sampled_from(CALLS), min_size=1, max_size=2),
)
conversations = st.lists(spoken | called, min_size=1, max_size=4)


@pytest.fixture(scope="module")
def whole_form() -> Any:
    """A tokenizer whose template shows everything that it is given."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages | tojson }}{{ tools | tojson }}{{ enable_thinking }}"
    return tokenizer


@given(conversations, st.booleans(), st.sampled_from([{}, {"chat_template_kwargs": {"enable_thinking": False}}]))
def test_the_embedded_form_is_the_embedded_engines(
    whole_form: Any, messages: list[dict[str, Any]], tools: bool, params: dict[str, Any]
):
    call = make_call(messages=messages, tools=(TOOL,) if tools else (), params=params)
    expected = PromptEncoder(whole_form).encode(messages, [TOOL] if tools else None, params.get("chat_template_kwargs"))
    assert Renderer(whole_form, DEFAULT).prompt_ids(call) == tuple(expected)


def test_the_embedded_engine_hides_tools_that_may_not_be_called():
    call = make_call(tools=(TOOL,), params={"tool_choice": "none"})
    assert (FORMS["embedded"].tools(call), len(FORMS["vllm"].tools(call))) == ([], 1)


REQUESTS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]},
    {"messages": [{"role": "developer", "content": "be"}, {"role": "user", "content": "hi"}]},
    {
        "messages": [
            {"role": "developer", "content": "be"},
            {"role": "user", "name": "x", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "refusal": None, "reasoning_content": "hm", "tool_calls": CALLS},
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "r"}]},
            {"role": "assistant", "content": "yo", "tool_calls": []},
            {"role": "system", "content": "late"},
            {"role": "system", "content": ""},
        ],
        "tools": [{"type": "function", "function": {"name": "bare"}}, TOOL],
        "tool_choice": "none",
    },
    {"messages": [{"role": "user", "content": "hi"}], "reasoning_effort": "low", "chat_template_kwargs": {"a": 1}},
    {"messages": [{"role": "user", "content": "hi"}], "reasoning_effort": "none"},
    {
        "messages": [{"role": "user", "content": "hi"}],
        "reasoning_effort": "none",
        "chat_template_kwargs": {"enable_thinking": True},
    },
]


def as_call(request: dict[str, Any]) -> Call:
    params = {key: value for key, value in request.items() if key not in ("messages", "tools")}
    return make_call(messages=request["messages"], tools=tuple(request.get("tools", ())), params=params)


def in_form(request: dict[str, Any]) -> dict[str, Any]:
    call = as_call(request)
    return {
        "messages": FORMS["vllm"].messages(call.messages, ""),
        "tools": FORMS["vllm"].tools(call),
        "arguments": template_arguments(call.params),
    }


@pytest.mark.vllm
@pytest.mark.slow
def test_the_vllm_form_is_vllms():
    result = subprocess.run(
        [str(vllm_python()), str(Path(__file__).with_name("vllm_forms.py"))],
        input=json.dumps([{"model": "m", **request} for request in REQUESTS]),
        capture_output=True,
        text=True,
        env=os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert result.returncode == 0, result.stderr[-2_000:]
    assert [in_form(request) for request in REQUESTS] == json.loads(result.stdout.splitlines()[-1])


def test_a_template_that_knows_developers_gets_them():
    messages = [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}]
    assert FORMS["vllm"].messages(messages, "{% if m.role == 'developer' %}") == messages
    assert FORMS["vllm"].messages(messages, "") == [{"role": "system", "content": "a\n\nb"}]


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, "text"])
def test_what_is_no_text_is_refused(part: Any):
    with pytest.raises(Unusable, match="image, audio or file"):
        content_text([part])
