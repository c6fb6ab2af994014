"""Our bugs are counted and stay inside; nothing secret goes to the engine or into a record."""

from __future__ import annotations

import logging
import pkgutil
from typing import Any

import openai
import pytest

from art_patch.patching import status
from art_patch.types import Route
from tests.support import httpx2_or_httpx as http
from tests.support.patched_sdk import CHAMPION
from tests.support.sdk_samples import ASK
from tests.support.servers import error

CANARY = "sk-canary-4f3c9a7e21"

HOOKS = [
    "routing.routed_call.identify",
    "routing.routed_call.surface_of",
    "sdk.surfaces.Chat.why_not_routed",
    "sdk.surfaces.Chat.to_engine_request",
    "sdk.surfaces.Chat.rewriter",
    "routing.routed_call.install",
    "routing.target.reason",
    "routing.target.Target.failed",
    "routing.target.Pins.policy",
    "routing.target.is_about_the_engine",
    "routing.routed_call.Exchange",
    "routing.routed_call.Exchange.saw",
    "routing.routed_call.Exchange.finish",
    "routing.routed_call.Exchange.forget_answer",
    "sdk.surfaces.ResponseRewriter",
    "rewriting.response_rewriter.ResponseRewriter.whole",
    "rewriting.response_rewriter.ResponseRewriter.stream",
    "rewriting.response_rewriter.StreamRewriter",
    "rewriting.response_rewriter.StreamRewriter.feed",
    "rewriting.response_rewriter.StreamRewriter.end",
    "rewriting.engine_request.EngineClients.get",
    "runtime.Runtime.allows",
    "runtime.Runtime.engine_answered",
    "runtime.Runtime.engine_failed",
]


class Bug(Exception):
    pass


def boom(*_: Any, **__: Any) -> Any:
    raise Bug("boom")


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("engine", ["up", "failing"])
@pytest.mark.parametrize("mode", ["record", "route"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_in_any_hook_does_not_reach_the_app(bench, client, monkeypatch, hook, engine, mode, stream):
    bench.expects_faults = True
    bench.patch(mode=mode)
    if engine == "failing":
        bench.local.always = error(500)
    place, _, name = f"art_patch.patching.{hook}".rpartition(".")
    with monkeypatch.context() as patched:
        patched.delenv("PYTEST_CURRENT_TEST")
        patched.setattr(pkgutil.resolve_name(place), name, boom)
        result = client.chat.completions.create(**ASK, stream=stream)
        if stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in result)
        else:
            text = result.choices[0].message.content
        assert text == "Hello there!"
        del result


def test_a_bug_is_raised_under_pytest(bench, client, monkeypatch):
    bench.expects_faults = True
    bench.patch()
    for hook in ("routing.routed_call.identify", "sdk.surfaces.to_engine_request"):
        with monkeypatch.context() as patched:
            patched.setattr(f"art_patch.patching.{hook}", boom)
            with pytest.raises(Bug):
                client.chat.completions.create(**ASK)


def test_bugs_are_logged_once_a_minute_and_counted(bench, client, monkeypatch, caplog):
    bench.expects_faults = True
    bench.patch()
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setattr("art_patch.patching.routing.routed_call.identify", boom)
    with caplog.at_level(logging.WARNING, "art_patch"):
        for _ in range(3):
            client.chat.completions.create(**ASK)
    assert status().errors == {"patching.begin": 3}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "boom" not in caplog.text


def secretive(url: str, **http_options: Any) -> openai.OpenAI:
    return openai.OpenAI(
        api_key=CANARY,
        base_url=url,
        organization=CANARY,
        project=CANARY,
        default_headers={"X-Secret": CANARY},
        default_query={"key": CANARY},
        max_retries=0,
        http_client=http.Client(**http_options) if http_options else None,
    )


POOLS = {
    "plain": {},
    "headers": {"headers": {"X-Pool": CANARY}},
    "auth": {"auth": ("user", CANARY)},
    "cookies": {"cookies": {"session": CANARY}},
    "params": {"params": {"token": CANARY}},
    "hook": {"event_hooks": {"request": [lambda request: request.headers.update({"X-Signed": CANARY})]}},
}


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
@pytest.mark.parametrize("engine", ["up", "failing"])
def test_no_secret_leaves(bench, monkeypatch, pool, engine):
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "OPENAI_ADMIN_KEY"):
        monkeypatch.setenv(name, CANARY)
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", f"X-Env: {CANARY}")
    bench.patch()
    if engine == "failing":
        bench.local.always = error(500, f"key {CANARY}")
        bench.upstream.always = error(500, f"key={CANARY} at https://me:{CANARY}@host/ with Bearer {CANARY}")
    extras: dict[str, Any] = {
        "extra_headers": {"Authorization": f"Bearer {CANARY}", "X-Call": CANARY},
        "extra_query": {"q": CANARY},
        "extra_body": {"api_key": CANARY},
        "user": CANARY,
    }
    with secretive(bench.upstream.url, **pool) as client:
        try:
            client.chat.completions.create(**ASK, **extras)
        except openai.InternalServerError as caught:
            assert engine == "failing" and CANARY in str(caught)
        assert engine == "failing" or bench.sink.call.policy == CHAMPION
    assert bench.sink.calls
    assert CANARY not in repr(bench.sink.records)
    (seen,) = bench.local.seen
    assert CANARY not in str(seen).replace(f'"user": "{CANARY}"', "")
    assert seen.headers["authorization"] == "Bearer none"


def test_nothing_goes_to_the_engine_through_a_proxy(bench, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", bench.upstream.url.removesuffix("/v1"))
    bench.patch()
    with openai.OpenAI(api_key="k", base_url=bench.upstream.url, max_retries=0) as client:
        client.chat.completions.create(**ASK)
    assert bench.upstream.seen == []
    assert len(bench.local.seen) == 1


def test_twins_go_with_their_clients(bench):
    import gc

    runtime = bench.patch()
    with openai.OpenAI(api_key="k", base_url=bench.upstream.url) as client:
        for _ in range(5):
            client.with_options(timeout=3).chat.completions.create(**ASK)
        gc.collect()
        assert len(runtime.engine_clients._engine_clients) == 0
        assert not client.is_closed()
        client.chat.completions.create(**ASK)
        assert len(runtime.engine_clients._engine_clients) == 1


def test_calls_to_the_engine_itself_are_left_alone(bench):
    bench.patch()
    with openai.OpenAI(api_key="k", base_url=bench.local.url, max_retries=0) as client:
        client.chat.completions.create(**ASK | {"model": "shop@2"})
    assert bench.local.seen[0].body["model"] == "shop@2"
    assert bench.sink.call.policy is None


def test_nested_calls_do_not_take_each_others_answers(bench):
    """A hook of the app's HTTP client calls another endpoint in the middle of a chat call."""
    bench.route = Route()
    bench.patch()
    inner = openai.OpenAI(api_key="k", base_url=bench.upstream.url, max_retries=0)

    def hook(_: Any) -> None:
        inner.embeddings.create(model="e", input="x", encoding_format="float")

    with (
        inner,
        openai.OpenAI(
            api_key="k",
            base_url=bench.upstream.url,
            max_retries=0,
            http_client=http.Client(event_hooks={"request": [hook]}),
        ) as client,
    ):
        client.chat.completions.create(**ASK)
    assert bench.sink.call.choices[0].message["content"] == "Hello there!"
