"""Which model answered: the one that upstream's answer names, by every API, whole and as a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from art_patch.types import UPSTREAM
from tests.support.sdk_samples import ASK
from tests.support.servers import (
    Answer,
    chunks,
    completion,
    error,
    response,
    response_events,
    text_chunks,
    text_completion,
)

TODAY, PRINT = "gpt-x-2026-06-01", "fp_44709d6fcb"
BOTH = f"{TODAY} {PRINT}"
RESPOND: dict[str, Any] = {"model": "gpt-x", "input": "hi", "store": False}
CONTINUE: dict[str, Any] = {"model": "gpt-x", "prompt": "hi"}
NAMED = {"model": TODAY, "system_fingerprint": PRINT}


def whole(body: Any) -> Answer:
    return Answer(body=json.dumps(body).encode())


def stream(events: Sequence[bytes], **changes: Any) -> Answer:
    """The events with these fields at the top of each."""
    return Answer(events=[_changed(event, lambda data: data | changes) for event in events])


def _changed(event: bytes, change: Callable[[Any], Any]) -> bytes:
    head, _, data = event.partition(b"data: ")
    if data.startswith(b"[DONE]"):
        return event
    return head + b"data: " + json.dumps(change(json.loads(data))).encode() + b"\n\n"


def late(events: Sequence[bytes]) -> Answer:
    """As Azure streams: the first event names no model, and the fingerprint comes with the last ones."""
    first, *middle, last, done = stream(events, **NAMED | {"system_fingerprint": None}).events or ()
    begun = _changed(first, lambda data: data | {"model": "", "choices": []})
    return Answer(events=[begun, *middle, _changed(last, lambda data: data | NAMED), done])


CASES = {
    "chat": (lambda it: it.chat.completions.create(**ASK), whole(completion(ASK, **NAMED)), BOTH),
    "chat without a fingerprint": (
        lambda it: it.chat.completions.create(**ASK),
        whole(completion(ASK, model=TODAY, system_fingerprint=None)),
        TODAY,
    ),
    "chat stream": (
        lambda it: list(it.chat.completions.create(**ASK, stream=True)),
        stream(chunks(ASK), **NAMED),
        BOTH,
    ),
    "chat stream, named late": (
        lambda it: list(it.chat.completions.create(**ASK, stream=True)),
        late(chunks(ASK)),
        BOTH,
    ),
    "completion": (lambda it: it.completions.create(**CONTINUE), whole(text_completion(CONTINUE, **NAMED)), BOTH),
    "completion stream": (
        lambda it: list(it.completions.create(**CONTINUE, stream=True)),
        stream(text_chunks(CONTINUE), **NAMED),
        BOTH,
    ),
    "response": (lambda it: it.responses.create(**RESPOND), whole(response(RESPOND, model=TODAY)), TODAY),
    "response stream": (
        lambda it: list(it.responses.create(**RESPOND, stream=True)),
        Answer(events=response_events(RESPOND, model=TODAY)),
        TODAY,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_upstreams_answers_name_it(bench, client, case):
    ask, answer, expected = CASES[case]
    bench.patch(mode="record")
    bench.upstream.will(answer)
    ask(client)
    call = bench.sink.call
    assert (call.policy, call.status, call.requested_model, call.answered_by) == (UPSTREAM, "ok", "gpt-x", expected)


def test_a_policys_answer_names_none_and_a_fallback_names_upstreams(bench, client):
    bench.patch()
    client.chat.completions.create(**ASK)
    bench.local.will(error(500))
    bench.upstream.will(whole(completion(ASK, **NAMED)))
    client.chat.completions.create(**ASK)
    ours, theirs = bench.sink.calls
    assert (ours.policy is not None, ours.answered_by) == (True, None)
    assert (theirs.policy, theirs.answered_by) == (UPSTREAM, BOTH)


@pytest.mark.parametrize("named", [{"model": None}, {"model": ""}, {"model": 7}, {"model": ["x"]}])
def test_an_answer_that_names_no_model_says_nothing(bench, client, named):
    bench.patch(mode="record")
    bench.upstream.will(whole(completion(ASK) | {"system_fingerprint": PRINT} | named))
    client.chat.completions.create(**ASK)
    assert bench.sink.call.answered_by is None


def test_a_failed_call_says_nothing(bench, client):
    import openai

    bench.patch(mode="record")
    bench.upstream.will(error(500))
    with pytest.raises(openai.APIStatusError):
        client.chat.completions.create(**ASK)
    assert bench.sink.call.answered_by is None


@pytest.mark.parametrize(
    ("model", "fingerprint", "expected"),
    [
        ("a model\tof\nmine", "fp 1", "a_model_of_mine fp_1"),
        ("m\x00\x1b[31m", None, "m__[31m"),
        ("m" * 500, "fp", "m" * 200),
        ("m" * 150, "f" * 500, f"{'m' * 150} {'f' * 49}"),
        ("m" * 199, "fp", "m" * 199),
        ("m", 7, "m"),
    ],
)
def test_it_is_one_short_line_whatever_the_server_sends(bench, client, model, fingerprint, expected):
    bench.patch(mode="record")
    bench.upstream.will(whole(completion(ASK, model=model, system_fingerprint=fingerprint)))
    client.chat.completions.create(**ASK)
    assert bench.sink.call.answered_by == expected
