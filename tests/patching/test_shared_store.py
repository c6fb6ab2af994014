"""An app whose store has other projects already: it adds its own, and follows only its own route."""

from __future__ import annotations

from pathlib import Path

import art_patch as art
from art_patch.store import open_store
from tests.support.sdk_samples import ASK


def test_it_records_and_routes_by_its_own_project(bench, client, tmp_path: Path):
    url = f"sqlite:///{tmp_path}/store.db"
    store = open_store(url, project="shop")
    store.ledger.add_base("agent@0", "/base", "ff", who="t")
    store.ledger.set_engine(bench.local.url, who="t")
    store.ledger.set_mode("route", who="t")
    art.patch(project="billing", store=url, home=tmp_path, flush_interval_s=0.01)
    with art.trajectory("mine"):
        client.chat.completions.create(**ASK)
        art.score("thumbs", 1.0)
    assert art.flush(10)
    assert (len(bench.upstream.seen), len(bench.local.seen), art.status().champion) == (1, 0, None)
    art.unpatch()
    assert (store.read.counts()["calls"], store.read.apps(since=0.0), store.read.recent()) == (0, (), ())
    own = open_store(url, create=False, project="billing")
    (run,) = own.read.recent()
    assert (len(run.calls), len(run.scores)) == (1, 1)
    own.close()

    art.patch(project="shop", store=url, home=tmp_path, flush_interval_s=0.01)
    client.chat.completions.create(**ASK)
    assert art.flush(10)
    assert (len(bench.local.seen), store.read.counts()["calls"], art.status().degraded) == (1, 1, ())
    assert store.verify() == []
    store.close()
