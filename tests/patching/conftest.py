"""Two servers, a sink that keeps what it is given, and the patch with both."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from art_patch._lib.faults import faults
from art_patch.patching import unpatch
from tests.support.patched_sdk import Bench
from tests.support.servers import StubServer, no_certificates, serving


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
