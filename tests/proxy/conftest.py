"""A real `art-patch proxy` process between a provider and an engine, over a real store; and plain bytes to ask it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from art_patch.store import open_store
from tests.proxy.provider import Provider, providing
from tests.support.command_line import warned
from tests.support.proxies import CHAMPION, Proxy, until
from tests.support.servers import StubServer, serving


@pytest.fixture(scope="package")
def provider_() -> Iterator[Provider]:
    with providing() as provider:
        yield provider


@pytest.fixture(scope="package")
def engine_() -> Iterator[StubServer]:
    with serving() as engine:
        yield engine


@pytest.fixture(scope="package")
def proxy_(provider_: Provider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    proxy = Proxy(tmp_path_factory.mktemp("proxy"), provider_.url)
    # The thread that reads the route starts with the first call, which each test may rely on, whichever is first.
    proxy.chat()
    proxy.calls(1)
    provider_.reset()
    yield proxy
    assert proxy.stop() == 0
    # What the tests break on purpose is one line each; nothing of ours may have failed.
    for line in warned(proxy.errors.read_text()).splitlines():
        assert line.startswith(("an answer broke off", "a call goes upstream unread")), line


@pytest.fixture
def provider(provider_: Provider) -> Iterator[Provider]:
    yield provider_
    provider_.reset()


@pytest.fixture
def engine(engine_: StubServer) -> Iterator[StubServer]:
    yield engine_
    engine_.reset()


@pytest.fixture
def proxy(proxy_: Proxy, provider: Provider) -> Proxy:
    """The proxy, with no engine behind it: calls go upstream."""
    assert proxy_.health()["engine"] is None
    return proxy_


@pytest.fixture
def routed(proxy: Proxy, engine: StubServer) -> Iterator[Proxy]:
    """The proxy with a champion."""
    store = open_store(proxy.store_url)
    store.ledger.add_base(CHAMPION, "/models/tiny", "0" * 64, who="test")
    store.ledger.set_engine(engine.url, who="test")
    until(lambda: proxy.health()["engine"] == engine.url)
    yield proxy
    store.ledger.set_engine(None, who="test")
    until(lambda: proxy.health()["engine"] is None)
    store.close()
