"""Calls that go past the patch and are told of by an integration."""

from __future__ import annotations

import pytest

from art_patch.context import ambient, span, suppress, trajectory
from art_patch.context.integration import record_call
from art_patch.recording import Recorder, set_recorder
from art_patch.settings import Settings
from art_patch.types import Call

ASK = {"model": "qwen", "messages": [{"role": "user", "content": "hi"}], "temperature": 0.5, "user": "not kept"}
ANSWER = '{"choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}]}'


def test_a_call_is_recorded_once(seen):
    passage = ambient.Passage()
    with trajectory("app") as app, span("turn") as turn:
        with ambient.passing(passage):
            call = record_call(ASK)
    assert call is not None and passage.recorded
    call.end(ANSWER)
    call.end(error=ValueError("too late"))
    (found,) = seen.of(Call)
    assert (found.trajectory_id, found.span_id, found.requested_model) == (app.id, turn, "qwen")
    assert (found.messages, found.params, found.api) == (tuple(ASK["messages"]), {"temperature": 0.5}, "chat")
    assert [choice.message["content"] for choice in found.choices] == ["Hello"]
    assert (found.status, found.policy) == ("ok", None)


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("token=abc"), "error"), (None, "abandoned")], ids=["failed", "given up"]
)
def test_calls_without_an_answer(seen, error, status):
    with ambient.passing(ambient.Passage()):
        call = record_call(ASK)
    call.end(error=error)
    (found,) = seen.of(Call)
    assert (found.status, found.choices, "abc" in str(found.error)) == (status, (), False)


def test_what_is_none_of_ours(seen):
    assert record_call(ASK) is None  # the patch sees it
    passage = ambient.Passage()
    with ambient.passing(passage):
        with suppress():
            assert record_call(ASK) is None
        recorder = Recorder(Settings(), open_sink=lambda: seen)
        set_recorder(recorder, lambda body: body["model"] != "qwen")
        assert record_call(ASK) is None
        set_recorder(None)
        assert record_call(ASK) is None
    assert not passage.recorded
    assert recorder.stop(10)
