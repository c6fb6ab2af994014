"""Which calls and scores a challenger is judged by, over both databases."""

from __future__ import annotations

import time

from art_patch.store import Store, open_store
from art_patch.types import ENGINE_FULL, REFUSED, UPSTREAM_ARM, ArmCall, Choice, Group, Score
from tests.support.store_samples import call, info

NEW, OLD = "agent@1", "agent@0"


def traffic(store: Store, state="canary", since: float = 10.0):
    return store.evidence.arm_traffic(challenger=NEW, champion=OLD, state=state, since=since)


def answered(text: str, finish: str = "stop") -> Choice:
    return Choice(0, {"role": "assistant", "content": text}, finish)


def test_a_canarys_calls_and_the_champions_since_it_began(store: Store):
    store.write([
        info("t1", session_id="visit"), info("t2", origin="explicit"), info("t3"), info("t4", session_id="visit"),
        call("before", "t4", 9.0, policy=NEW),
        call("goes on", "t4", 10.5, policy=OLD),  # pinned to its policy, so no chance decided
        call("new", "t1", 10.0, policy=NEW, duration_ms=500.0),
        call("old", "t2", 11.0, policy=OLD, ttft_ms=None, status="error", choices=(), completion_tokens=0),
        call("upstream", "t3", 12.0, policy=None),
        call("earlier champion", "t3", 12.0, policy="agent@7"),
        call("copy", "t3", 12.0, policy=NEW, shadow_of="old"),
        call("left", "t1", 13.0, policy=None, fallback=f"{NEW}: the engine answered HTTP 500"),
        call("left by the champion", "t2", 14.0, policy=None, fallback="the engine did not answer in time"),
        call("no room", "t1", 15.0, policy=None, fallback=f"{NEW}: {ENGINE_FULL}"),
        call("no room for the champion", "t2", 16.0, policy=None, fallback=ENGINE_FULL),
        call("of a process that may ask none", "t2", 17.0, policy=None, fallback=REFUSED),
    ])  # fmt: skip
    found = traffic(store)
    assert found.calls == (
        ArmCall("new", "t1", "visit", None, 10.5, NEW, "ok", False, 500.0, 1.5, False),
        ArmCall("old", "t2", "t2", None, 11.005, OLD, "error", False, 5.0, None, False),
        ArmCall("left", "t1", "visit", None, 13.005, NEW, "ok", True, 5.0, 1.5, False),
        ArmCall("left by the champion", "t2", "t2", None, 14.005, OLD, "ok", True, 5.0, 1.5, False),
        ArmCall("no room", "t1", "visit", None, 15.005, "", "ok", True, 5.0, 1.5, False),
        ArmCall("no room for the champion", "t2", "t2", None, 16.005, "", "ok", True, 5.0, 1.5, False),
        ArmCall("of a process that may ask none", "t2", "t2", None, 17.005, "", "ok", True, 5.0, 1.5, False),
    )
    counts = store.read.counts()
    assert (counts["calls_fell_back"], counts["calls_engine_full"]) == (5, 2)
    assert found.scores == ()


def test_beside_upstream_a_full_engine_keeps_the_session_in(store: Store):
    """Upstream's sessions meet no engine, so the busy times would be missing on the canary's side alone."""
    store.write([
        info("t1", session_id="visit"), info("t2", session_id="other"),
        call("new", "t1", 10.0, policy=NEW),
        call("no room", "t1", 11.0, policy=None, fallback=f"{NEW}: {ENGINE_FULL}"),
        call("left", "t1", 12.0, policy=None, fallback=f"{NEW}: the engine answered HTTP 500"),
        call("theirs", "t2", 13.0, policy=None, in_control_group=True),
    ])  # fmt: skip
    found = store.evidence.arm_traffic(challenger=NEW, champion=None, state="canary", since=10.0)
    assert [(each.id, each.policy, each.fell_back) for each in found.calls] == [
        ("new", NEW, False), ("no room", NEW, False), ("left", NEW, True), ("theirs", UPSTREAM_ARM, False),
    ]  # fmt: skip


def test_an_answer_is_empty_without_tokens_of_its_own_or_cut_off(store: Store):
    cases = {
        "said": (answered("yes"), 2, False),
        "only its end": (answered(""), 1, True),
        "cut off": (answered("and so on and", "length"), 40, True),
        "not counted": (answered("yes"), 0, False),
    }
    calls = [
        call(key, "t1", 10.0 + n, choices=(choice,), completion_tokens=tokens)
        for n, (key, (choice, tokens, _)) in enumerate(cases.items())
    ]
    store.write([info("t1"), *calls])
    assert {each.id: each.empty for each in traffic(store).calls} == {
        key: empty for key, (_, _, empty) in cases.items()
    }


def test_calls_that_the_app_gives_no_run_are_assigned_by_their_opening_and_so_counted(store: Store):
    """Such an app may send the same prompt a thousand times: one hash sends all of them to the same policy."""
    first, other = ({"role": "user", "content": "yes or no?"},), ({"role": "user", "content": "why?"},)
    more = (*first, {"role": "assistant", "content": "no"}, {"role": "user", "content": "sure?"})
    store.write([
        info("t1"), info("t2", origin="stitched"), info("t3"), info("t4", origin="explicit"), info("t5", origin="otel"),
        call("a", "t1", 10.0, messages=first), call("b", "t2", 11.0, messages=first),
        call("c", "t2", 12.0, messages=more), call("d", "t3", 13.0, messages=other),
        call("e", "t4", 14.0, messages=first), call("f", "t5", 15.0, messages=first),
    ])  # fmt: skip
    session = {each.id: each.session for each in traffic(store).calls}
    assert session["a"] == session["b"] == session["c"]
    assert session["d"] not in (session["a"], "t3")
    assert (session["e"], session["f"]) == ("t4", "t5")


def test_scores_of_the_runs_come_along_and_no_others(store: Store):
    mine = [Score("s2", "t1", "thumbs", 1.0, "user", 3.0), Score("s1", "t1", "reward", 0.5, "code", 4.0)]
    store.write([info("t1"), info("t2"), call("a", "t1", 11.0, policy=NEW), call("b", "t2", 1.0, policy=OLD)])
    store.write([*mine, Score("s3", "t2", "reward", 0.5, "code", 4.0)])
    assert traffic(store).scores == tuple(mine)


def test_a_shadows_copies_and_the_calls_that_they_copy(store: Store):
    store.write([
        info("t1"), info("t2", origin="shadow"), info("t3", origin="shadow"), info("t4", origin="resampled"),
        call("asked", "t1", 9.0, policy=OLD), call("not copied", "t1", 11.0, policy=OLD),
        call("copy", "t2", 12.0, policy=NEW, shadow_of="asked"),
        call("copy of what was erased", "t3", 13.0, policy=NEW, shadow_of="gone"),
        call("asked again", "t4", 14.0, policy=NEW, shadow_of="asked"),
    ])  # fmt: skip
    found = [(each.id, each.policy, each.shadow_of) for each in traffic(store, "shadow").calls]
    assert found == [("asked", OLD, None), ("copy", NEW, "asked"), ("copy of what was erased", NEW, "gone")]


def test_of_many_calls_the_first_are_looked_at_so_that_a_later_look_sees_the_same(store: Store):
    store.write([info("t1"), *(call(f"c{n}", "t1", 10.0 + n, policy=NEW) for n in range(9))])
    found = store.evidence.arm_traffic(challenger=NEW, champion=OLD, state="canary", since=0.0, limit=3)
    assert ([each.id for each in found.calls], found.is_whole) == (["c0", "c1", "c2"], False)
    assert traffic(store).is_whole


def test_how_long_a_look_takes(sqlite_url: str, record_property):
    store = open_store(sqlite_url)
    store.write([info(f"t{n}") for n in range(500)])
    store.write([call(f"c{n}", f"t{n % 500}", 10.0 + n, policy=NEW if n % 20 == 0 else OLD) for n in range(2_000)])
    began = time.process_time()
    assert len(traffic(store).calls) == 2_000
    record_property("figure", ["a look at 2,000 calls, ms", f"{1000 * (time.process_time() - began):.0f}", ""])
    store.close()


def test_a_judges_scores_count_once_their_group_is_scored(store: Store):
    """Until then nobody doubted them; what is quarantined is not to be trusted."""
    store.write([info("t1"), info("t2"), call("a", "t1", 10.0, policy=NEW), call("b", "t2", 11.0, policy=OLD)])
    runs = store.read.trajectories(["t1", "t2"])
    store.ledger.add_groups([Group("g", "task:x", "same_task", runs)], now=12.0)
    user = Score("u", "t1", "reward", 1.0, "user", 13.0)
    ranks = [Score(f"r-{key}", key, "ruler", 0.5, "ruler", 14.0, group_id="g") for key in ("t1", "t2")]
    store.write([user, *ranks])
    for state, known in (("formed", {"u"}), ("scored", {"u", "r-t1", "r-t2"}), ("quarantined", {"u"})):
        store.ledger.set_groups(["g"], state)
        assert {score.id for score in traffic(store).scores} == known
