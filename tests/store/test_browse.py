"""Finding trajectories, in both databases; notes on exports."""

from __future__ import annotations

import pytest

from art_patch.rewards import rewards_G
from art_patch.store import Cursor, Filter, Store
from art_patch.types import Group
from tests.support.run_samples import fill
from tests.support.store_samples import call, info


@pytest.fixture
def filled(store: Store) -> Store:
    fill(store)
    return store


def found(store: Store, filter: Filter) -> str:
    return " ".join(key for _, key in store.browse.ids(filter))


ALL = "failed plain b2 b1 b0 a2 a1 a0 opened"


@pytest.mark.parametrize(
    ("filter", "ids"),
    [
        (Filter(), ALL),
        (Filter(shadows=True), "failed shadow " + ALL.removeprefix("failed ")),
        (Filter(origin="shadow"), "shadow"),
        (Filter(user="user-a"), "a2 a1 a0"),
        (Filter(user="User-a"), ""),
        (Filter(user="user-b", session="session-1"), "b1"),
        (Filter(scenario="plum"), "a2 a1 a0"),
        (Filter(scenario="scenario:plum"), "a2 a1 a0"),
        (Filter(group="group-b"), "b2 b1 b0"),
        (Filter(tag="Web"), "b2 b1 a2 a1"),
        (Filter(tag="web"), ""),
        (Filter(tag="é"), "b2 b1 a2 a1"),
        (Filter(tag="We"), ""),
        (Filter(name="fruit", until=1_100.0), "a2 a1 a0"),
        (Filter(policy="agent@1"), "b2 b1 b0 a2 a1 a0"),
        (Filter(policy="upstream"), "failed plain"),
        (Filter(since=2_000.0), "failed plain opened"),
        (Filter(since=1_011.0, until=1_101.6), "b0 a2 a1"),
        (Filter(min_reward=0.8), "b2 b0 a2 a0"),
        (Filter(max_reward=0.1), "b1 a1"),
        (Filter(min_reward=0.5, max_reward=0.9), "b0 a0"),
        (Filter(status="error"), "failed"),
        (Filter(model="gpt-5"), "failed"),
        (Filter(model="gpt-5-mini", since=1_110.0), "plain b2 b1"),
        (Filter(model="gpt"), ""),
        (Filter(error="timeouterr"), "failed"),
        (Filter(error="VALUE"), "failed"),
        (Filter(error="a_i%"), ""),
        (Filter(slower_than_s=0.5, user="user-b"), "b2 b1 b0"),
        (Filter(slower_than_s=0.6), ""),
        (Filter(status="ok", user="user-p"), "plain"),
        (Filter(trainable=True), "b2 b1 b0 a2 a1 a0"),
        (Filter(trainable=False), "failed plain opened"),
    ],
)
def test_filters(filled: Store, filter: Filter, ids: str):
    assert found(filled, filter) == ids
    assert filled.browse.count(filter) == len(ids.split())


def test_the_model_that_answered_is_found_too(store: Store):
    store.write([info("t"), call("c", "t", policy=None, answered_by="gpt-5-2026-01-01")])
    assert found(store, Filter(model="gpt-5-2026-01-01")) == "t"


def test_the_worst_come_first(filled: Store):
    worst = filled.browse.worst
    assert worst(Filter(), "reward") == ["b1", "a1", "b0", "a0", "b2", "a2"]
    assert worst(Filter(user="user-a"), "reward", limit=2) == ["a1", "a0"]
    assert worst(Filter(), "reward", among=["a0", "plain", "b1", "nobody"]) == ["b1", "a0"]
    slow = [info("slow"), call("quick", "slow", duration_ms=20.0), call("slow", "slow", duration_ms=900.0)]
    filled.write(slow)
    assert worst(Filter(), "latency", limit=3) == ["slow", "b2", "b1"]
    assert worst(Filter(since=1_000.0, until=1_050.0), "latency") == ["a2", "a1", "a0"]
    (summary,) = filled.browse.summaries(["slow"])
    assert (summary.calls, summary.slowest_ms) == (2, 900.0)


@pytest.mark.parametrize("limit", [1, 2, 4, 9, 100])
def test_pages_hold_everything_once(filled: Store, limit: int):
    seen: list[Cursor] = []
    after: Cursor | None = None
    while page := filled.browse.ids(Filter(), after=after, limit=limit):
        assert len(page) <= limit
        seen += page
        after = page[-1]
    assert " ".join(key for _, key in seen) == ALL


def test_groups_come_with_matching_members(filled: Store):
    assert filled.browse.groups(Filter()) == [
        ("group-a", "scenario:plum", "scenario_key", ["a0", "a1", "a2"]),
        ("group-b", "scenario:pear", "scenario_key", ["b0", "b1", "b2"]),
    ]
    ((key, _, _, members),) = filled.browse.groups(Filter(session="session-1"), after="group-a", limit=1)
    assert (key, members) == ("group-b", ["b1"])


def test_an_id_by_its_beginning(filled: Store):
    assert filled.browse.resolve("a") == ["a0", "a1", "a2"]
    assert filled.browse.resolve("plai") == ["plain"]
    assert filled.browse.resolve("A") == filled.browse.resolve("%") == []


def test_summaries(filled: Store):
    a0, failed, opened = filled.browse.summaries(["a0", "nobody", "failed", "opened"], openings=True)
    assert (a0.calls, a0.prompt_tokens, a0.completion_tokens, a0.trainable_calls) == (2, 6, 6, 2)
    assert (a0.policies, a0.reward, a0.scores, a0.status) == (("agent@1",), 0.8, 1, "ok")
    assert (a0.opening, a0.name, a0.user_id, a0.group_id) == ("What is a plum?", "fruit", "user-a", "group-a")
    assert a0.duration_s == 1.5
    assert (failed.status, failed.failed_calls, failed.policies) == ("error", 1, ("upstream",))
    assert (opened.calls, opened.opening, opened.reward, opened.last_call_at) == (0, "", None, None)


def test_the_reward_is_the_one_that_is_trained_on(filled: Store):
    for key, scenario, how, ids in filled.browse.groups(Filter()):
        group = Group(key, scenario, how, filled.read.trajectories(ids))
        assert tuple(one.reward for one in filled.browse.summaries(ids)) == rewards_G(group)


def test_an_export_is_noted_before_it_is_written(filled: Store):
    with filled.transfers.note_export("/x", "chat", who="ann", now=5.0) as note:
        note.add(["a0", "a1"])
        note.add(["a1", "b0"])
        assert [held.path for held in filled.rights.erase(trajectory="a1", dry_run=True).exports] == ["/x"]
    (export,) = filled.transfers.exports()
    assert (export.at, export.trajectories, export.who) == (5.0, 3, "ann")
    assert filled.verify() == []
