"""LiteLLM: what it sends by its own HTTP clients is recorded once, and so is what goes through the SDK."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.environments import environment, run_app
from tests.support.recorded import store_url, trajectories
from tests.support.servers import serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


SUPPRESSED, NOWHERE = Counter(suppressed=1), Counter(nowhere=1)


def test_every_call_once(tmp_path: Path):
    python = environment("litellm", ["litellm>=1.106,<2", "mcp>=2,<3"])
    url = store_url(tmp_path)
    with serving() as server:
        told = run_app(python, "litellm_app.py", url, server.url)
        asked = Counter(seen.body["model"] for seen in server.seen)
    warned = told.pop("warned")
    past = {"litellm": 5, "litellm.responses": 3}
    assert "integration litellm" in told["instrumented"]
    assert (told["errors"], told["bypasses"]) == ({}, past)
    assert [line.partition(": pass")[0] for line in warned] == [
        f"art_patch: a call went past the patch ({door}), recorded, but not routed" for door in past
    ]

    (found,) = trajectories(url)
    assert found.info.name == "app"
    assert Counter(call.requested_model for call in found.calls) == asked - SUPPRESSED + NOWHERE
    assert {(call.requested_model, call.api, call.status) for call in found.calls} == {
        ("gpt-sdk", "chat", "ok"),
        ("whole", "chat", "ok"),
        ("stream", "chat", "ok"),
        ("gpt-responses", "responses", "ok"),
        ("gpt-responses-stream", "responses", "ok"),
        ("nowhere", "chat", "error"),
    }
    for call in found.calls:
        assert call.messages == ({"role": "user", "content": "hi"},)
        assert [choice.message["content"] for choice in call.choices] == ["Hello there!"] * (call.status == "ok")
    whole = next(call for call in found.calls if call.requested_model == "whole")
    assert (whole.params, whole.prompt_tokens, whole.completion_tokens) == ({"temperature": 0.5}, 3, 3)
    (turn,) = found.spans
    assert sum(call.span_id == turn.id for call in found.calls) == 4  # those of `ask_asynchronously`
