"""Each reason against training holds for one change to a call that can be trained on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from art_patch.trajectories import why_untrainable
from art_patch.trajectories.trainability import REASONS
from art_patch.types import Call, Choice

CHOICE = Choice(0, {"role": "assistant", "content": "x"}, "stop", (5, 6), (-0.5, -0.1))
GOOD = Call(
    "c", "t", 0.0, "m", (), choices=(CHOICE,), policy="p@1", prompt_token_ids=(1,), prompt_tokens=1, completion_tokens=2
)


def with_choice(**changes):
    return replace(GOOD, choices=(CHOICE, replace(CHOICE, **changes)), completion_tokens=0)


BAD = {
    "a completion is not a chat": replace(GOOD, policy=None, api="completions"),
    "the provider holds a part of the prompt": replace(GOOD, policy=None, params={"previous_response_id": "resp_1"}),
    "answered by upstream": replace(GOOD, policy=None),
    "the call failed": replace(GOOD, status="error"),
    "the call was cancelled": replace(GOOD, status="cancelled"),
    "the stream was not read to its end": replace(GOOD, status="abandoned"),
    "no answer": replace(GOOD, choices=()),
    "the prompt holds an image, audio or file": replace(
        GOOD,
        messages=(
            {
                "role": "user",
                "content": [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": "x"}}],
            },
            {"role": "assistant", "content": "a pear"},
            {"role": "user", "content": "and now?"},
        ),
    ),
    "prompt token ids are missing": replace(GOOD, prompt_token_ids=None),
    "token ids are missing": with_choice(token_ids=None),
    "log-probabilities are missing": with_choice(logprobs=None),
    "token ids and log-probabilities differ in number": with_choice(logprobs=(-0.5,)),
    "token ids and usage differ in number": replace(GOOD, completion_tokens=3),
    "a log-probability is not finite": with_choice(logprobs=(-0.5, float("-inf"))),
    "how the answer ended is not known": with_choice(finish_reason=None),
    "greedy sampling has no exploration": replace(GOOD, params={"temperature": 0}),
    "top_p cuts the distribution": replace(GOOD, params={"top_p": 0.9}),
    "top_k cuts the distribution": replace(GOOD, params={"top_k": 20}),
    "min_p cuts the distribution": replace(GOOD, params={"min_p": 0.1}),
    "logit_bias shifts the distribution": replace(GOOD, params={"logit_bias": {"5": 1}}),
    "presence_penalty shifts the distribution": replace(GOOD, params={"presence_penalty": 0.1}),
    "frequency_penalty shifts the distribution": replace(GOOD, params={"frequency_penalty": 0.1}),
    "repetition_penalty shifts the distribution": replace(GOOD, params={"repetition_penalty": 1.1}),
    "response_format constrains the answer": replace(GOOD, params={"response_format": {"type": "json_object"}}),
    "structured_outputs constrains the answer": replace(GOOD, params={"structured_outputs": {"choice": ["a", "b"]}}),
    "tool_choice constrains the answer": replace(GOOD, params={"tool_choice": "required"}),
    "min_tokens constrains the answer": replace(GOOD, params={"min_tokens": 5}),
    "bad_words constrains the answer": replace(GOOD, params={"bad_words": ["no"]}),
    "allowed_token_ids constrains the answer": replace(GOOD, params={"allowed_token_ids": [5, 6]}),
}


@pytest.mark.parametrize(("reason", "call"), BAD.items(), ids=BAD)
def test_reason(reason, call):
    assert why_untrainable(call) == reason


def test_every_reason_is_tried_here():
    assert list(BAD) == [reason for reason, _ in REASONS]


def test_a_temperature_that_vllm_does_not_sample_at_is_greedy():
    assert why_untrainable(replace(GOOD, params={"temperature": 0.001})) == "greedy sampling has no exploration"
    assert why_untrainable(replace(GOOD, params={"temperature": 0.01})) is None


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7, "top_p": 1, "top_k": -1, "presence_penalty": 0.0},
        {"response_format": {"type": "text"}, "tool_choice": "auto", "min_tokens": 0},
    ],
)
def test_trainable(params):
    assert why_untrainable(replace(GOOD, params=params)) is None
    assert why_untrainable(replace(GOOD, completion_tokens=0)) is None
