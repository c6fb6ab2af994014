"""An app that has another instrumentation on besides ours; run by `test_peers` in a process of its own.

`python -m tests.patching.peers_app PEER peer_first|patch_first` makes the same calls with the peer alone and with both,
recorded and routed, and prints what came of them as one line of JSON:

    alone, record, route: call -> types of its result
    spans: the same three -> how many spans the peer made of all calls, `null` if that cannot be told
    calls: mode -> how many records we made of all calls
    after_unpatch: how many more we made later
    faults, logged, warned: what we complained about
    changed: the SDK's functions that are, after `unpatch()`, not what they were before `patch()`

or `{"broken": WHY}` if the peer that is installed cannot even be imported.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import openai
from pydantic import BaseModel

from art_patch._lib.faults import faults
from art_patch.patching import unpatch
from tests.support.patched_sdk import Bench
from tests.support.sdk_samples import ASK
from tests.support.servers import serving

CallCount = Callable[[], int | None]


class look(BaseModel):
    """What the tool of this name is called with; the stub's name for it."""

    at: str


class App:
    """Makes every shape of call. A peer that wraps clients, not classes, replaces them here."""

    def __init__(self, url: str) -> None:
        self.client: Any = openai.OpenAI(api_key="sk-x", base_url=url, max_retries=0)
        self.make_async: Callable[[], Any] = lambda: openai.AsyncOpenAI(api_key="sk-x", base_url=url, max_retries=0)
        self.calls: dict[str, Callable[[], Any]] = {
            "create": lambda: self.client.chat.completions.create(**ASK),
            "stream": self._stream,
            "async": lambda: asyncio.run(self._asynchronously()),
            "raw": self._raw,
            "parse": lambda: self.client.chat.completions.parse(**ASK),
        }

    def _stream(self) -> Any:
        stream = self.client.chat.completions.create(**ASK, stream=True)
        return stream, *list(stream)

    async def _asynchronously(self) -> Any:
        async with self.make_async() as client:
            return await client.chat.completions.create(**ASK)

    def _raw(self) -> Any:
        raw = self.client.chat.completions.with_raw_response.create(**ASK)
        return raw, raw.parse()

    def make_all(self) -> dict[str, Any]:
        """Make each call; return the types of what came."""
        return {name: _types(call) for name, call in self.calls.items()}


def _types(call: Callable[[], Any]) -> list[str]:
    try:
        result = call()
    except Exception as error:  # a peer may not know a shape; then it must fail in the same way beside us
        return [f"raised {type(error).__name__}"]
    kinds = {type(item) for item in (result if isinstance(result, tuple) else (result,))}
    return sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)


# The peers. Each is put on as its users do, and returns what tells how many spans it has made so far.


def _spans(make: Callable[[], Any]) -> CallCount:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    make().instrument(tracer_provider=provider)
    return lambda: _not_ours(exporter)


def _not_ours(exporter: Any) -> int:
    return sum(span.instrumentation_scope.name != "art_patch" for span in exporter.get_finished_spans())


def _instrumentor(module: str) -> Callable[[App], CallCount]:
    return lambda app: _spans(lambda: importlib.import_module(module).OpenAIInstrumentor())


def _langfuse(app: App) -> CallCount:
    from langfuse import Langfuse
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    traces = Langfuse(public_key="pk-lf-x", secret_key="sk-lf-x", base_url="http://127.0.0.1:9", span_exporter=exporter)
    importlib.import_module("langfuse.openai")

    def seen() -> int:
        traces.flush()
        return _not_ours(exporter)

    return seen


def _sentry(app: App) -> CallCount:
    import sentry_sdk
    from sentry_sdk.integrations.openai import OpenAIIntegration
    from sentry_sdk.transport import Transport

    counts: list[int] = []

    class Nowhere(Transport):
        def capture_envelope(self, envelope: Any) -> None:
            # Spans of models travel beside the transaction, all others in it.
            counts.extend(item.headers["item_count"] for item in envelope.items if item.type == "span")

    def traced(call: Callable[[], Any]) -> Any:
        with sentry_sdk.start_transaction(name="app"):
            return call()

    sentry_sdk.init(
        dsn="http://x@127.0.0.1:9/1", transport=Nowhere, traces_sample_rate=1.0, integrations=[OpenAIIntegration()]
    )
    app.calls = {name: partial(traced, call) for name, call in app.calls.items()}
    return lambda: sum(counts)


def _langsmith(app: App) -> CallCount:
    os.environ["LANGSMITH_TRACING"] = "true"
    from langsmith import Client
    from langsmith.wrappers import wrap_openai
    from requests import Response, Session

    class Nowhere(Session):
        def request(self, *args: Any, **kwargs: Any) -> Response:
            response = Response()
            response.status_code, response._content = 202, b"{}"
            return response

    extra: Any = {"client": Client(api_url="http://127.0.0.1:9", api_key="x", session=Nowhere(), info={})}
    make_async = app.make_async
    app.client = wrap_openai(app.client, tracing_extra=extra)
    app.make_async = lambda: wrap_openai(make_async(), tracing_extra=extra)
    return lambda: None


def _instructor(app: App) -> CallCount:
    import instructor

    plain = app.make_async
    client: Any = instructor.from_openai(app.client)

    async def asynchronously() -> Any:
        async with plain() as inner:
            return await instructor.from_openai(inner).chat.completions.create(response_model=look, **ASK)

    app.calls["create"] = lambda: client.chat.completions.create(response_model=look, **ASK)
    app.calls["stream"] = lambda: tuple(client.chat.completions.create_partial(response_model=look, **ASK))
    app.calls["async"] = lambda: asyncio.run(asynchronously())
    return lambda: None


PEERS: dict[str, tuple[str, Callable[[App], CallCount]]] = {
    "instructor": ("instructor", _instructor),
    "langfuse": ("langfuse", _langfuse),
    "langsmith": ("langsmith", _langsmith),
    "openinference": (
        "openinference.instrumentation.openai",
        _instrumentor("openinference.instrumentation.openai"),
    ),
    "opentelemetry": (
        "opentelemetry.instrumentation.openai",
        _instrumentor("opentelemetry.instrumentation.openai"),
    ),
    "opentelemetry_v2": (
        "opentelemetry.instrumentation.openai_v2",
        _instrumentor("opentelemetry.instrumentation.openai_v2"),
    ),
    "sentry": ("sentry_sdk", _sentry),
}
"""Name -> the module that must be importable, and how it is put on."""


def _sdk() -> dict[str, Any]:
    """The function objects of the SDK that anybody could have replaced."""
    from openai._base_client import AsyncAPIClient, SyncAPIClient
    from openai.resources.chat.completions import AsyncCompletions, Completions

    owners = (SyncAPIClient, AsyncAPIClient, openai.OpenAI, openai.AsyncOpenAI, Completions, AsyncCompletions)
    return {
        f"{owner.__qualname__}.{name}": value
        for owner in owners
        for name, value in vars(owner).items()
        if callable(value)
    }


def main(peer: str, order: str) -> dict[str, Any]:
    """Make all calls alone and beside the peer."""
    logged: list[str] = []
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("art_patch").addHandler(handler)
    warnings.showwarning = lambda message, category, filename, *_: warned.append(f"{filename}: {message}")
    told: dict[str, Any] = {"spans": {}, "calls": {}}
    with serving() as upstream, serving() as local:
        bench, app = Bench(upstream, local), App(upstream.url)

        def all_calls(name: str, seen: CallCount) -> None:
            before = seen()
            told[name] = app.make_all()
            after = seen()
            told["spans"][name] = None if before is None or after is None else after - before
            if name != "alone":
                told["calls"][name] = len(bench.sink.calls)
                bench.sink.records.clear()

        def beside(seen: CallCount) -> None:
            for mode in ("record", "route"):
                bench.patch(mode=mode)
                all_calls(mode, seen)

        put_on = PEERS[peer][1]
        if order == "peer_first":
            seen = put_on(app)
            all_calls("alone", seen)
            was = _sdk()
            beside(seen)
            unpatch()
        else:
            was = _sdk()
            bench.patch(mode="record")
            seen = put_on(app)
            beside(seen)
            unpatch()
            all_calls("alone", seen)
        now = _sdk()
        told["changed"] = sorted(name for name in was.keys() | now.keys() if was.get(name) is not now.get(name))
        told["after_unpatch"] = len(bench.sink.calls)
    told |= {"faults": dict(faults.counts), "logged": logged}
    told["warned"] = [line for line in warned if "art_patch" in line]
    return told


if __name__ == "__main__":
    try:
        importlib.import_module(PEERS[sys.argv[1]][0])
    except ImportError as error:
        result = {"broken": str(error)}
    else:
        result = main(*sys.argv[1:])
    sys.stdout.write("\n" + json.dumps(result) + "\n")
