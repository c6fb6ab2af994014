"""Two servers, a sink that keeps what it is given, and the patch with both."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from art_patch._lib.faults import faults
from art_patch.patching import control, flush, unpatch
from art_patch.patching.runtime import Runtime
from art_patch.settings import Settings
from art_patch.types import Call, Record, Route
from tests.support.servers import StubServer, no_certificates, serving

CHAMPION = "shop@3"


class Sink:
    """Keeps records in memory."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, records: Sequence[Record]) -> None:
        self.records += records

    @property
    def calls(self) -> list[Call]:
        """The calls so far, everything queued included."""
        gc.collect()
        assert flush(10)
        return [record for record in self.records if isinstance(record, Call)]

    @property
    def call(self) -> Call:
        """The only call."""
        (call,) = self.calls
        return call


class Bench:
    """Everything a test of the patch needs."""

    def __init__(self, upstream: StubServer, local: StubServer) -> None:
        self.upstream = upstream
        self.local = local
        self.sink = Sink()
        self.expects_faults = False
        self.route = Route(champion=CHAMPION, base_url=local.url)

    def patch(self, **changes: Any) -> Runtime:
        """Patch the SDK; the route is read anew at each poll."""
        # A busy machine may need longer than a quarter of a second to accept a connection.
        given = {"flush_interval_s": 0.005, "timeout_s": 5.0, "poll_interval_s": 0.05, "connect_timeout_s": 2.0}
        settings = Settings(**given | changes)
        return control.start(settings, open_sink=lambda: self.sink, read_route=lambda url: self.route)


@pytest.fixture(scope="package")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StubServer, StubServer]]:
    with no_certificates(tmp_path_factory.mktemp("no-certificates")), serving() as upstream, serving() as local:
        yield upstream, local
    gc.unfreeze()


@pytest.fixture
def servers(running: tuple[StubServer, StubServer]) -> Iterator[tuple[StubServer, StubServer]]:
    yield running
    for server in running:
        server.reset()


@pytest.fixture
def bench(servers: tuple[StubServer, StubServer]) -> Iterator[Bench]:
    faults.clear()
    # Collecting garbage is part of many tests here; what lived before the test need not be looked at each time.
    gc.collect()
    gc.freeze()
    bench = Bench(*servers)
    yield bench
    gc.collect()
    unpatch()
    for thread in threading.enumerate():
        if thread.name == "art_patch-shadow":  # its last request must not reach the servers of the next test
            thread.join(30)
    assert bench.expects_faults or faults.counts == {}


@pytest.fixture
def client(bench: Bench) -> Iterator[Any]:
    """A client of upstream, made before any patch."""
    import openai

    with openai.OpenAI(api_key="sk-upstream-secret", base_url=bench.upstream.url, max_retries=0) as client:
        yield client


@pytest.fixture
def make_async(bench: Bench) -> Callable[[], Any]:
    """Makes an asynchronous client of upstream; use it with `async with`."""
    import openai

    return lambda: openai.AsyncOpenAI(api_key="sk-upstream-secret", base_url=bench.upstream.url, max_retries=0)
