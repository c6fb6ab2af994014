"""An engine that takes connections and never answers slows down the pages that ask it, and no other ones."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from art_patch.settings import Settings, load_settings
from art_patch.store import open_store
from tests.support.web import served


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[tuple[Settings, socket.socket]]:
    """A project whose engine hangs, until the socket is closed."""
    settings = load_settings(home=tmp_path, project="one")
    settings.directory.mkdir(parents=True)
    with socket.socket() as engine, closing(open_store(settings.store_url, project="one")) as store:
        engine.bind(("127.0.0.1", 0))
        engine.listen(200)
        store.ledger.add_base("agent@0", "base", "0" * 64, who="ada")
        store.ledger.set_engine(f"http://127.0.0.1:{engine.getsockname()[1]}", who="ada")
        yield settings, engine


def test_pages_that_wait_for_an_engine_hold_up_no_others(
    hung: tuple[Settings, socket.socket], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("art_patch.insights.standing._ANSWER_S", 300.0)
    settings, engine = hung
    found = list[int]()
    with served(settings) as running, running.entered() as client:

        def ask(path: str) -> None:
            found.append(httpx.get(running.url + path, cookies=client.cookies, timeout=120).status_code)

        paths = ["/p/one/system/engine", "/status", "/api/v1/one/system/engine"] * 20
        threads = [threading.Thread(target=ask, args=(path,)) for path in paths]
        for thread in threads:
            thread.start()
        for path in ("", "runs", "groups", "cycles", "policies", "policies/agent@0", "review", "system"):
            assert client.get(f"/p/one/{path}").status_code == 200, path
        assert not found
        engine.close()  # what waits for it fails, and the pages say so
        for thread in threads:
            thread.join(60)
    assert found == [200] * 60
