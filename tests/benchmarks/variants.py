"""What is compared: ours in two modes and four peers, each as one would install it, exporting to nowhere.

A variant is put on once in a process of its own. `Switch` then takes the very functions that it left on the SDK's
classes off and on again, so that bare and patched calls alternate in one process, on one connection, and "bare" is the
SDK's own function objects. Spans go through the exporter that the peer itself uses for batches, into nothing.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from tests.benchmarks.stub import CHAMPION

NEEDS = {
    "langfuse": ("langfuse",),
    "otel_openai": ("opentelemetry.sdk", "opentelemetry.instrumentation.openai"),
    "openinference": ("opentelemetry.sdk", "openinference.instrumentation.openai"),
    "langsmith": ("langsmith",),
}
"""Peer -> modules that must be importable."""

_TOUCHED = ("openai._client", "openai._base_client", "openai.resources")
_LOADED_FIRST = (
    "openai.resources.beta",
    "openai.resources.chat.completions",
    "openai.resources.completions",
    "openai.resources.embeddings",
    "openai.resources.images",
    "openai.resources.responses",
)


def missing() -> list[str]:
    """The peers' modules that are not installed."""
    return sorted({module for modules in NEEDS.values() for module in modules if not _is_there(module)})


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


@dataclass
class Switch:
    """One variant in force, and the way out and back in.

    Attributes:
        settle: waits until nothing is left to do in the background.
        seen: how many patched calls arrived where the variant sends them; -1 where that cannot be counted.
        client: makes the patched calls; `None` if every client is patched.
    """

    settle: Callable[[], Any]
    seen: Callable[[], int]
    client: Any = None
    _changes: list[tuple[type, str, Any, Any]] = field(default_factory=list)

    def put_on(self) -> None:
        for owner, name, _, after in self._changes:
            _set(owner, name, after)

    def take_off(self) -> None:
        for owner, name, before, _ in self._changes:
            _set(owner, name, before)


_ABSENT = object()


def _set(owner: type, name: str, value: Any) -> None:
    if value is not _ABSENT:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)


def _classes() -> list[type]:
    found = {
        id(value): value
        for name, module in list(sys.modules.items())
        if name.startswith(_TOUCHED)
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__.partition(".")[0] == "openai"
    }
    return list(found.values())


def install(variant: str, client: Any, url: str, home: str) -> Switch:
    """Put `variant` on in this process and return its switch, on."""
    for module in _LOADED_FIRST:
        importlib.import_module(module)
    before = {owner: dict(vars(owner)) for owner in _classes()}
    switch = _INSTALL[variant](client, url, home)
    for owner, was in before.items():
        now = dict(vars(owner))
        for name in was.keys() | now.keys():
            old, new = was.get(name, _ABSENT), now.get(name, _ABSENT)
            if old is not new:
                switch._changes.append((owner, name, old, new))
    assert switch._changes or switch.client, f"{variant} left nothing on the SDK's classes"
    return switch


def _record(client: Any, url: str, home: str) -> Switch:
    import art_patch as art

    art.patch(home=home, mode="record")
    return Switch(lambda: art.flush(60), lambda: art.status().recorded)


def _route(client: Any, url: str, home: str) -> Switch:
    import art_patch as art
    from art_patch.settings import load_settings
    from art_patch.store import open_store

    store = open_store(load_settings(home=home).store_url)
    store.ledger.add_base(CHAMPION, "base", "0" * 64, who="benchmark")
    store.ledger.set_engine(f"{url}/engine/v1", who="benchmark")
    store.close()
    art.patch(home=home, mode="route")
    assert art.status().champion == CHAMPION
    return Switch(lambda: art.flush(60), lambda: art.status().served_by_policy)


def _exporter() -> Any:
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Nowhere(SpanExporter):
        count = 0

        def export(self, spans: Sequence[Any]) -> Any:
            self.count += len(spans)
            return SpanExportResult.SUCCESS

        def shutdown(self) -> None:
            pass

        def force_flush(self, timeout_millis: int = 0) -> bool:
            return True

    return Nowhere()


def _instrumented(make: Callable[[], Any]) -> Switch:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter, provider = _exporter(), TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    make().instrument(tracer_provider=provider)
    return Switch(provider.force_flush, lambda: exporter.count)


def _otel_openai(client: Any, url: str, home: str) -> Switch:
    from opentelemetry.instrumentation.openai import OpenAIInstrumentor

    return _instrumented(OpenAIInstrumentor)


def _openinference(client: Any, url: str, home: str) -> Switch:
    from openinference.instrumentation.openai import OpenAIInstrumentor

    return _instrumented(OpenAIInstrumentor)


def _langfuse(client: Any, url: str, home: str) -> Switch:
    from langfuse import Langfuse

    exporter = _exporter()
    traces = Langfuse(public_key="pk-lf-x", secret_key="sk-lf-x", base_url="http://127.0.0.1:9", span_exporter=exporter)
    importlib.import_module("langfuse.openai")  # the drop-in: importing it is using it
    return Switch(traces.flush, lambda: exporter.count)


def _langsmith(client: Any, url: str, home: str) -> Switch:
    os.environ["LANGSMITH_TRACING"] = "true"
    from langsmith import Client
    from langsmith.wrappers import wrap_openai

    traces = Client(api_url="http://127.0.0.1:9", api_key="x", session=_Nowhere(), info={})
    # It wraps one client, so the patched calls have one of their own, on the same connections.
    return Switch(traces.flush, lambda: -1, wrap_openai(client.copy(), tracing_extra={"client": traces}))


def _Nowhere() -> Any:
    """A `requests` session that takes everything and sends nothing."""
    import requests

    class Nowhere(requests.Session):
        def request(self, *args: Any, **kwargs: Any) -> requests.Response:
            response = requests.Response()
            response.status_code, response._content = 202, b"{}"
            return response

    return Nowhere()


_INSTALL: dict[str, Callable[[Any, str, str], Switch]] = {
    "record": _record,
    "route": _route,
    "langfuse": _langfuse,
    "openinference": _openinference,
    "otel_openai": _otel_openai,
    "langsmith": _langsmith,
}
VARIANTS = tuple(_INSTALL)
OURS = ("record", "route")
PEERS = tuple(NEEDS)
