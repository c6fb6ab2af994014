"""LiteLLM asks Anthropic and Gemini by handlers of their own, past the SDK and past its common HTTP handler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.other_providers import serving_others
from tests.support.recorded import store_url, trajectories

APP = Path(__file__).parent / "litellm_providers_app.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("litellm") is None, reason="litellm is not installed"),
]


def test_each_call_is_recorded_once_and_what_is_not_is_told(tmp_path: Path):
    url = store_url(tmp_path)
    with serving_others() as (address, paths):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(APP), url, address],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            timeout=200,
        )
    assert done.returncode == 0, done.stderr
    assert sorted(path.rpartition("/")[2] for path in paths) == sorted(
        ["messages"] * 6  # one of them suppressed, one in Anthropic's own tongue
        + ["gemini-whole:generateContent", "gemini-async:generateContent"]
        + ["gemini-stream:streamGenerateContent", "gemini-async-stream:streamGenerateContent"]
    )
    told = json.loads(done.stdout.splitlines()[-1])
    (line,) = told.pop("warned")
    assert told == {"errors": {}, "bypasses": [{}, {"litellm": 1}]}
    assert line.startswith("art_patch: a call went past the patch (litellm), neither recorded nor routed: pass ")

    (found,) = trajectories(url)
    assert found.info.name == "app"
    assert sorted(
        (
            call.requested_model,
            call.api,
            call.status,
            call.messages,
            call.params,
            (call.prompt_tokens, call.completion_tokens),
            [(choice.message["role"], choice.message["content"], choice.finish_reason) for choice in call.choices],
        )
        for call in found.calls
    ) == sorted(
        (
            f"{name}-{way}",
            "chat",
            "error" if way == "nowhere" else "ok",
            ({"role": "user", "content": "hi"},),
            {"max_tokens": 50},
            (0, 0) if way == "nowhere" else (3, 3),
            [] if way == "nowhere" else [("assistant", "Hello there!", "stop")],
        )
        for name in ("claude", "gemini")
        for way in ("whole", "stream", "async", "async-stream", "nowhere")
    )
