"""The wrappers call `RoutedCall` in the order that the docstring of `patching.sdk.wrapping` shows."""

from __future__ import annotations

import re
from typing import Any

import openai
import pytest

from art_patch.patching.routing.routed_call import RoutedCall
from art_patch.patching.sdk import wrapping
from tests.support.sdk_samples import ASK, saying
from tests.support.servers import error

SHOWN = re.findall(r"^ {4}.*", wrapping.__doc__ or "", re.MULTILINE)


@pytest.fixture
def order(monkeypatch) -> list[str]:
    """The names of the methods that were called, in order; a name that repeats stands there once."""
    seen: list[str] = []

    def noting(name: str, method: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if name == "claim":  # the SDK's own clients ask, too; one of them gets the response
                claimed = method(*args, **kwargs)
                seen.extend([name] if claimed else [])
                return claimed
            if seen[-1:] != [name]:
                seen.append(name)
            return method(*args, **kwargs)

        return noted

    def begin(*args: Any) -> Any:
        seen.append("begin")
        return real_begin(*args)

    real_begin = wrapping.begin
    monkeypatch.setattr(wrapping, "begin", begin)
    for name, method in list(vars(RoutedCall).items()):
        if not name.startswith("_") and callable(method) and name != "covers":
            monkeypatch.setattr(RoutedCall, name, noting(name, method))
    return seen


STREAM = "claim rewriter first_token_timeout_s read_held_back hand_out_stream"


@pytest.mark.parametrize(
    ("stream", "engine", "upstream", "calls"),
    [
        (False, None, None, "begin next_attempt claim rewriter rewrite_whole answered"),
        (True, None, None, f"begin next_attempt {STREAM} answered"),
        (False, error(500), None, "begin next_attempt attempt_failed claim capture answered"),
        (False, error(500), error(500), "begin next_attempt attempt_failed last_attempt failed"),
        (
            False,
            saying({"content": " "}),
            error(500),
            "begin next_attempt claim rewriter rewrite_whole attempt_failed last_attempt "
            "claim rewriter rewrite_whole answered",
        ),
    ],
    ids=["whole", "stream", "fallback", "both fail", "empty"],
)
def test_the_order_of_the_calls(bench, client, order, stream, engine, upstream, calls):
    bench.patch()
    bench.local.always, bench.upstream.always = engine, upstream
    try:
        result = client.with_options(max_retries=0).chat.completions.create(**ASK, stream=stream)
        list(result) if stream else None
    except openai.InternalServerError:
        assert upstream is not None
    assert order == calls.split()
    shown = " ".join(SHOWN)
    assert [name for name in order if name not in shown] == []
