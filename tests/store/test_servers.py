"""The rows of a project's servers, over both databases."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace

import sqlalchemy

from art_patch._lib.process import Owner
from art_patch.store import Server, Store, open_store

A = Owner("a", "here", 11, "boot 1", "77")
B = Owner("b", "there", 12)


def test_a_server_is_announced_renewed_and_removed(store: Store, url: str):
    assert store.servers.all() == ()
    older = store.servers.announce("http://here:1/v1", A, now=1.0)
    newer = store.servers.announce("http://there:2/v1", B, now=2.0)
    assert store.servers.all() == (newer, older) == (Server("http://there:2/v1", B, 2.0, 2.0), older)
    renewed = store.servers.renew(older, now=3.0)
    leaving = store.servers.renew(newer, leaving=True, now=4.0)
    assert renewed == replace(older, beat=1, renewed_at=3.0)
    assert leaving == replace(newer, beat=1, renewed_at=4.0, leaving=True)
    other = open_store(url)
    assert other.servers.all() == (leaving, renewed)
    other.servers.remove(older)
    other.close()
    assert store.servers.all() == (leaving,)
    assert store.servers.renew(renewed, now=5.0) in store.servers.all(), "it lives, and was thought to have ended"
    assert store.verify() == []


def test_a_server_of_a_newer_release_may_tell_more(store: Store, url: str):
    """Two releases run side by side during an upgrade, and each reads the other's row."""
    newer = store.servers.announce("http://there:2/v1", B, now=2.0)
    with closing(sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool).connect()) as connection:
        its = sqlalchemy.text("SELECT value FROM control WHERE key = 'server b'")
        row = json.loads(connection.scalar(its))
        row = {**row, "release": "0.9.0", "owner": {**row["owner"], "user": "ada"}}
        its = sqlalchemy.text("UPDATE control SET value = :row WHERE key = 'server b'")
        connection.execute(its, {"row": json.dumps(row)})
        connection.commit()
    assert store.servers.all() == (newer,)


def test_a_server_leaves_route_and_mode_alone(store: Store):
    store.ledger.set_engine("http://here:1/v1", who="test", now=1.0)
    store.ledger.set_mode("shadow", who="test")
    before = store.ledger.route()
    server = store.servers.announce("http://there:2/v1", B, now=2.0)
    assert store.ledger.route() == before
    store.servers.remove(server)
    assert store.ledger.route() == before
