"""One upstream, one store, one patched SDK; and the metrics, in a table at the end of the run.

A duration is printed, never asserted: this machine may be busy. What must not hang has a timeout of ten times its
budget instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

import art_patch as art
from art_patch._lib.faults import faults
from tests.support.apps import App, Programs, Store
from tests.support.servers import StubServer, no_certificates, serving


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str, object, str], None]:
    """Put a figure into the table at the end of the run: its name, what was measured, what was wanted."""

    def collect(name: str, value: object, target: str = "") -> None:
        record_property("figure", [name, f"{value:.4g}" if isinstance(value, float) else str(value), target])

    return collect


@pytest.fixture(scope="package")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StubServer, StubServer]]:
    with no_certificates(tmp_path_factory.mktemp("no-certificates")), serving() as upstream, serving() as local:
        yield upstream, local


@pytest.fixture
def upstream(running: tuple[StubServer, StubServer]) -> Iterator[StubServer]:
    yield running[0]
    running[0].reset()


@pytest.fixture
def local(running: tuple[StubServer, StubServer]) -> Iterator[StubServer]:
    yield running[1]
    running[1].reset()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "deep" / "store.db")


@pytest.fixture
def app(upstream: StubServer, store: Store) -> Iterator[App]:
    faults.clear()
    with openai.OpenAI(api_key="k", base_url=upstream.url, max_retries=0) as client:
        yield App(upstream, store, client)
    art.unpatch()


@pytest.fixture
def programs(upstream: StubServer, store: Store) -> Programs:
    return Programs(upstream, store)
