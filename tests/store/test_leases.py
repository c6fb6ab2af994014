"""Leases over both databases: one owner, a token that only grows, and writes that end with it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest

from art_patch._lib.process import Owner
from art_patch.errors import Busy
from art_patch.store import Lease, Store, open_store
from art_patch.types import TrajectoryInfo
from tests.support.postgres import Execute

A = Owner("a", "here", 11, "boot 1", "77")
B = Owner("b", "there", 12)


def take(store: Store, owner: Owner, seen: Lease | None = None, *, now: float = 1.0) -> Lease:
    lease = store.leases.take(seen or store.leases.read("cycle"), owner, who="test", now=now)
    assert lease is not None
    return lease


def test_a_lease_is_taken_renewed_and_given_back(store: Store):
    assert store.leases.read("cycle") == Lease("cycle")
    lease = take(store, A)
    assert lease == store.leases.read("cycle") == Lease("cycle", 1, 0, A, 1.0)
    assert store.leases.renew(lease, now=2.0)
    assert store.leases.read("cycle") == replace(lease, beat=1, renewed_at=2.0)
    assert store.leases.release(lease)
    assert store.leases.read("cycle").owner is None
    assert not store.leases.renew(lease, now=3.0)
    assert take(store, B).token == 2
    assert store.leases.read("other") == Lease("other")


@pytest.mark.parametrize("after", ["renewed", "given back", "taken by another"])
def test_only_the_lease_that_was_seen_can_be_taken(store: Store, after: str):
    mine = take(store, A)
    seen = store.leases.read("cycle")
    if after == "renewed":
        store.leases.renew(mine, now=2.0)
    elif after == "given back":
        store.leases.release(mine)
    else:
        take(store, replace(A, id="c"), seen)
    assert store.leases.take(seen, B, who="test", now=3.0) is None


def test_of_ten_that_try_at_once_one_gets_it(store: Store, url: str):
    ready = Barrier(10)

    def attempt(n: int) -> Lease | None:
        opened = open_store(url)
        seen = opened.leases.read("cycle")
        ready.wait()
        lease = opened.leases.take(seen, replace(A, id=f"a{n}"), who="test", now=1.0)
        opened.close()
        return lease

    with ThreadPoolExecutor(10) as pool:
        got = [lease for lease in pool.map(attempt, range(10)) if lease]
    assert got == [store.leases.read("cycle")]


def test_whoever_lost_the_lease_can_neither_renew_nor_give_back_nor_write(store: Store):
    old = take(store, A)
    fenced = store.fenced(old)
    fenced.ledger.add_base("agent@0", "base", "0" * 64, who="test")
    fenced.write([TrajectoryInfo("t1", 1.0)])
    new = take(store, B)
    assert not store.leases.renew(old, now=9.0)
    assert not store.leases.release(old)
    with pytest.raises(Busy, match="taken over"):
        fenced.ledger.add_base("other@0", "base", "0" * 64, who="test")
    with pytest.raises(Busy, match="taken over"):
        fenced.ledger.set_engine("http://127.0.0.1:1/v1", who="test")
    with pytest.raises(Busy, match="taken over"):
        fenced.write([TrajectoryInfo("t2", 1.0)])
    assert [policy.name for policy in fenced.ledger.policies()] == ["agent@0"]  # reading is free
    assert [one.id for one in store.read.trajectories(["t1", "t2"])] == ["t1"]
    store.fenced(new).write([TrajectoryInfo("t2", 1.0)])
    store.leases.release(new)
    with pytest.raises(Busy):
        store.fenced(new).write([TrajectoryInfo("t3", 1.0)])


def test_a_takeover_is_in_the_audit_log_and_an_ordinary_change_of_hands_is_not(store: Store, execute: Execute):
    store.leases.release(take(store, A))
    take(store, B)
    assert execute("SELECT action FROM audit") == []
    take(store, A)
    assert execute("SELECT action, who FROM audit") == [("lease taken over", "test")]
    assert store.verify() == []


def test_nobody_takes_the_lease_over_in_the_middle_of_a_write(store: Store, url: str):
    """What the check saw still holds when the transaction commits."""
    fenced = store.fenced(take(store, A))
    opened, said = open_store(url), []
    seen = opened.leases.read("cycle")

    def over() -> None:
        take(opened, B, seen)
        said.append("taken over")

    with ThreadPoolExecutor(1) as pool:
        with fenced.leases._database.write(durable=True):
            future = pool.submit(over)
            with pytest.raises(TimeoutError):
                future.result(0.3)
            said.append("written")
        future.result(60)
    opened.close()
    assert said == ["written", "taken over"]
