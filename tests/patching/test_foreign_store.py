"""An app whose store belongs to another project: neither recorded nor routed, said once, and nothing breaks."""

from __future__ import annotations

import logging
from pathlib import Path

import art_patch as art
from art_patch.patching import control
from art_patch.store import open_store
from tests.support.sdk_samples import ASK


def test_it_neither_records_nor_routes(bench, client, tmp_path: Path, caplog):
    url = f"sqlite:///{tmp_path}/store.db"
    store = open_store(url, project="shop")
    store.ledger.add_base("agent@0", "/base", "ff", who="t")
    store.ledger.set_engine(bench.local.url, who="t")
    store.ledger.set_mode("route", who="t")
    with caplog.at_level(logging.WARNING, "art_patch"):
        art.patch(project="billing", store=url, home=tmp_path, poll_interval_s=0.01, flush_interval_s=0.01)
        for _ in range(3):
            client.chat.completions.create(**ASK)
            control._process.runtime.poll()
    status = art.status()
    assert (len(bench.upstream.seen), len(bench.local.seen)) == (3, 0)
    assert (status.patched, status.mode, status.recorded, status.champion) == (True, "off", 0, None)
    (sentence,) = status.degraded
    assert "belongs to project 'shop', and this is project 'billing'" in sentence
    assert [line for line in caplog.messages if "belongs to" in line] == [caplog.messages[0]]
    art.unpatch()
    assert store.read.counts()["calls"] == 0
    assert store.read.apps(since=0.0) == ()
    assert not (tmp_path / "billing").exists()

    art.patch(project="shop", store=url, home=tmp_path, flush_interval_s=0.01)
    client.chat.completions.create(**ASK)
    assert art.flush(10)
    assert (len(bench.local.seen), store.read.counts()["calls"], art.status().degraded) == (1, 1, ())
    store.close()


def test_what_is_scored_does_not_reach_it(bench, client, tmp_path: Path):
    bench.expects_faults = True
    url = f"sqlite:///{tmp_path}/store.db"
    store = open_store(url, project="shop")
    art.patch(project="billing", store=url, flush_interval_s=0.01)
    with art.trajectory("mine"):
        client.chat.completions.create(**ASK)
        art.score("thumbs", 1.0)
    assert art.flush(10), "it is dropped, and waits for nothing"
    assert len(art.status().degraded) == 1
    art.unpatch()
    assert store.read.trajectories(["mine"]) == ()
    assert store.verify() == []
    store.close()


def test_a_server_is_asked_too(bench, client, tmp_path: Path):
    """As for a file; a store behind a network is read by the recorder's thread, and calls go upstream until then."""
    from art_patch.patching.runtime import Runtime
    from art_patch.settings import Settings
    from art_patch.types import Route

    settings = Settings(project="billing", store="postgresql+psycopg://nobody@127.0.0.1:9/x")
    runtime = Runtime(settings, read_route=lambda url: Route(champion="a@0", base_url=bench.local.url, project="shop"))
    runtime.poll()
    assert (runtime.target.mode, runtime.target.routes) == ("off", False)
    runtime.stop(0.1)
