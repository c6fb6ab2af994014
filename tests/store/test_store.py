"""The store through its public interface: what goes in comes out whole, and nothing is lost or torn.

Everything here is true of both databases; see conftest.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from art_patch.errors import ConfigError, StoreError, TransitionError
from art_patch.store import Store, open_store, read_route
from art_patch.trajectories import canonical
from art_patch.types import Choice, Group, Judgement, Route, Score, SpanInfo, Trajectory
from tests.support.postgres import Execute
from tests.support.store_samples import WRITER, call, info, policy


def test_what_is_written_is_read_back_whole(store: Store):
    first = call("c1")
    follow_up = call(
        "c2",
        at=2.0,
        messages=(*first.messages, first.choices[0].message, {"role": "user", "content": "more"}),
        policy=None,
        prompt_token_ids=None,
        choices=(Choice(0, {"role": "assistant", "content": "ok"}, None),),
        status="abandoned",
        fallback="engine not reachable",
        untrainable="answered by upstream",
        error="x",
        params={},
        tools=(),
    )
    about = info(name="n", scenario_key="s", tags=("a", "b"), metadata={"lang": "de"}, session_id="1", user_id="u")
    score = Score("k", "t1", "thumbs", 1.0, "user", 3.0, comment="good")
    span = SpanInfo("s1", "t1", "plan", 1.0)
    store.write([about, span, first, follow_up, score])
    assert store.read.trajectories(["t1", "unknown"]) == (Trajectory(about, (first, follow_up), (score,), (span,)),)
    assert store.verify() == []


def test_what_judging_took_is_added_up(store: Store):
    nothing = {"calls": 0, "prompt_tokens": 0, "completion_tokens": 0, "cost_usd": 0.0, "unpriced": 0}
    assert store.read.counts()["judge"] == nothing
    priced = Judgement("j1", "g1", 1.0, "gpt", "r1", "score", "ok", None, 2, 100, 10, 0.25)
    unpriced = Judgement("j2", "g2", 1.0, "mine", "r1", "gate", "failed", "no answer", 3, 50, 5, None, {"parts": 1})
    for judgement in (priced, unpriced, priced):
        store.ledger.add_judgement(judgement)
    assert store.read.counts()["judge"] == {
        "calls": 5, "prompt_tokens": 150, "completion_tokens": 15, "cost_usd": 0.25, "unpriced": 3,
    }  # fmt: skip


def test_a_batch_written_twice_leaves_one_copy(store: Store):
    batch = [info(), call("c1"), Score("k", "t1", "thumbs", 1.0, "user", 3.0)]
    store.write(batch)
    store.write(batch)
    (trajectory,) = store.read.trajectories(["t1"])
    assert trajectory == Trajectory(info(), (call("c1"),), (Score("k", "t1", "thumbs", 1.0, "user", 3.0),))


def test_an_ended_trajectory_keeps_what_was_known_before(store: Store):
    store.write([info(name="n", user_id="u"), call("c1")])
    store.write([info(ended_at=9.0, error="ValueError")])
    (trajectory,) = store.read.trajectories(["t1"])
    assert trajectory.info == info(name="n", user_id="u", ended_at=9.0, error="ValueError")


def test_a_call_that_was_extended_is_single_no_longer(store: Store):
    store.write([info(origin="single"), call("c1")])
    store.write([info(origin="stitched"), call("c2", at=2.0)])
    store.write([info(origin="single")])  # a late duplicate changes nothing
    (trajectory,) = store.read.trajectories(["t1"])
    assert trajectory.info.origin == "stitched"


def test_writing_a_score_again_replaces_it(store: Store):
    store.write([info(), Score("k", "t1", "thumbs", 1.0, "user", 3.0)])
    store.write([Score("k", "t1", "thumbs", 0.0, "user", 4.0, comment="changed my mind")])
    (trajectory,) = store.read.trajectories(["t1"])
    assert trajectory.scores == (Score("k", "t1", "thumbs", 0.0, "user", 4.0, comment="changed my mind"),)


def test_shared_history_is_kept_once(store: Store, execute: Execute):
    history: tuple[dict[str, str], ...] = ()
    for turn in range(20):
        history = (*history, {"role": "user", "content": f"turn {turn}"})
        answer = {"role": "assistant", "content": f"answer {turn}"}
        store.write([info(), call(f"c{turn}", at=float(turn), messages=history, choices=(Choice(0, answer, "stop"),))])
        history = (*history, answer)
    (trajectory,) = store.read.trajectories(["t1"])
    assert trajectory.calls[-1].messages == history[:-1]
    assert execute("SELECT count(*) FROM nodes") == [(40,)]


def test_keys_keep_their_order_because_chat_templates_render_them_in_it(store: Store):
    tools = ({"type": "function", "function": {"name": "b", "description": "a"}},)
    message = {"role": "user", "content": "", "name": "zed", "audio": None}
    store.write([info(), call("c1", messages=(message,), tools=tools)])
    (trajectory,) = store.read.trajectories(["t1"])
    assert json.dumps(trajectory.calls[0].tools) == json.dumps(tools)
    assert json.dumps(trajectory.calls[0].messages) == json.dumps([message])


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


_numbers = itertools.count()


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.lists(st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "name"]), json_values), max_size=5))
def test_any_json_messages_survive(store: Store, messages: list[dict[str, object]]):
    key = f"t{next(_numbers)}"
    store.write([info(key), call(f"c-{key}", key, messages=tuple(messages), choices=())])
    (trajectory,) = store.read.trajectories([key])
    assert [canonical(m) for m in trajectory.calls[0].messages] == [canonical(m) for m in messages]
    assert store.verify() == []


def test_ungrouped_are_those_that_settled_and_no_group_holds(store: Store):
    store.write(
        [info("a"), call("c1", "a", at=10.0), info("b"), call("c2", "b", at=20.0), info("c"), call("c3", "c", at=99.0)]
    )
    assert [t.id for t in store.read.ungrouped(settled_before=50.0)] == ["a", "b"]
    group = Group("g", "task:x", "same_task", store.read.trajectories(["a", "b"]))
    store.ledger.add_groups([group], now=1.0)
    assert store.read.ungrouped(settled_before=50.0) == ()
    assert store.read.groups(state="formed") == (group,)
    assert store.read.groups(state="formed", held_out=True) == ()
    store.ledger.set_groups(["g"], "scored")
    assert [g.id for g in store.read.groups(state="scored")] == ["g"]
    assert store.verify() == []


def test_runs_that_are_known_to_have_ended_need_not_settle(store: Store):
    for key, at in (("late", 200.0), ("old", 5.0), ("later", 300.0), ("grouped", 250.0)):
        store.write([info(key), call(f"c-{key}", key, at=at)])
    store.write([info("empty")])
    store.ledger.add_groups([Group("g", "s", "same_task", store.read.trajectories(["grouped"]))])
    found = store.read.ungrouped(settled_before=50.0, ended=["later", "late", "grouped", "empty", "unknown", "old"])
    assert [t.id for t in found] == ["old", "late", "later"]
    assert store.read.known(["late", "unknown", "empty"]) == {"late", "empty"}


def test_a_promotion_moves_the_route_and_retires_the_old_champion(store: Store, url: str):
    ledger = store.ledger
    assert read_route(url) == Route()
    ledger.add_base("agent@0", "/base", "ff", who="test", now=0.0)
    ledger.set_engine("http://127.0.0.1:1/v1", key_file="/k", who="test", now=4.0)
    ledger.add_candidate(policy(1), trained_on=[], who="test")
    ledger.move("agent@1", "champion", who="me", reason="won", metrics={"difference": 0.2}, now=5.0)
    assert read_route(url) == Route(
        champion="agent@1", base_url="http://127.0.0.1:1/v1", key_file="/k", engine_since=4.0
    )
    assert {p.name: p.state for p in ledger.policies()} == {"agent@0": "retired", "agent@1": "champion"}
    assert [(m["policy"], m["from_state"], m["to_state"]) for m in ledger.history()] == [
        ("agent@0", "champion", "retired"),
        ("agent@1", "candidate", "champion"),
        ("agent@1", None, "candidate"),
        ("agent@0", "candidate", "champion"),
        ("agent@0", None, "candidate"),
    ]
    ledger.set_engine(None, who="test")
    assert not read_route(url).serves
    ledger.set_mode("record", who="test")
    assert read_route(url).mode == "record"
    ledger.set_mode(None, who="test")
    assert read_route(url).mode is None
    assert store.verify() == []


@pytest.mark.parametrize(
    ("step", "to", "words"),
    [
        (1, "retired", "only become learner, shadow, canary, champion or rejected"),
        (0, "champion", "already champion"),
        (0, "rejected", "only become retired"),
    ],
)
def test_forbidden_moves_are_refused_and_change_nothing(store: Store, step: int, to: str, words: str):
    store.ledger.add_base("agent@0", "/base", "ff", who="test")
    store.ledger.add_candidate(policy(1), trained_on=[], who="test")
    before = store.ledger.policies(), store.ledger.history()
    with pytest.raises(TransitionError, match=words):
        store.ledger.move(f"agent@{step}", to, who="me", reason="x")  # type: ignore[arg-type]
    assert (store.ledger.policies(), store.ledger.history()) == before


def test_moving_an_unknown_policy_says_where_to_look(store: Store):
    with pytest.raises(StoreError, match="art-patch policies"):
        store.ledger.move("agent@7", "champion", who="me", reason="x")


def test_verify_finds_what_was_tampered_with(store: Store, execute: Execute):
    ids = tuple(range(600))
    store.write([info(), call("c1", prompt_token_ids=ids), call("c2", prompt_token_ids=(9, *ids))])
    store.ledger.add_base("agent@0", "/base", "ff", who="test")
    assert store.verify() == []
    execute("UPDATE audit SET who = 'nobody' WHERE id = 1")
    execute("DELETE FROM nodes WHERE length(parent) > 0")
    execute("""INSERT INTO choices (call_id, "index", answer, project_id, agent_id)
        SELECT 'gone', "index", answer, 1, 1 FROM choices LIMIT 1""")
    execute("INSERT INTO trainings VALUES ('agent@9', 'g', 1, 1)")
    execute("INSERT INTO export_members VALUES ('t1', 'e', 1, 1)")
    execute("INSERT INTO trained_rows VALUES ('agent@9', 'gone', 0, 'away', 'g', 0.5, 1.0, 1, 1)")
    execute("UPDATE calls SET session_id = 'other' WHERE id = 'c1'")
    execute("INSERT INTO scenarios VALUES ('task', false, 1.0, 1, 7)")
    execute("DELETE FROM token_blocks WHERE id = (SELECT prompt_block FROM calls WHERE id = 'c1')")
    execute("UPDATE token_blocks SET parent = id WHERE id = (SELECT prompt_block FROM calls WHERE id = 'c2')")
    found = "\n".join(store.verify())
    assert "audit entry 1 was altered" in found
    assert "1 answers whose call is missing" in found
    assert "2 calls whose prompt is missing" in found
    assert "1 trainings whose policy is missing" in found
    assert "1 trained rows whose policy is missing" in found
    assert "1 trained rows whose call is missing" in found
    assert "1 trained rows whose trajectory is missing" in found
    assert "1 calls whose session or user is not their trajectory's" in found
    assert "1 rows of scenarios whose project or agent is missing" in found
    assert "1 members of exports whose export is missing" in found
    assert "1 calls whose prompt ids are missing" in found
    assert found.count("of prompt ids does not match its hash") == 1


@pytest.mark.parametrize("bad", ["mysql://x/y", "sqlite:///", "store.db"])
def test_an_unknown_url_is_refused(bad: str):
    with pytest.raises(ConfigError, match="sqlite:////absolute"):
        open_store(bad)


def test_a_missing_store_is_not_made_by_readers(url: str):
    for _ in range(2):
        with pytest.raises(StoreError, match="there is no store"):
            open_store(url, create=False)
    assert read_route(url) == Route()


def test_four_processes_write_at_once_and_nothing_is_lost(store: Store, url: str, processes: list):
    for n in range(4):
        command = [sys.executable, "-c", WRITER, url, f"w{n}", "25"]
        processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
    assert [writer.wait(timeout=60) for writer in processes] == [0, 0, 0, 0]
    assert store.read.counts()["calls"] == 4 * 25 * 10
    assert store.verify() == []


def test_a_killed_writer_tears_nothing_and_loses_nothing_acknowledged(store: Store, url: str, processes: list):
    for attempt in range(5):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, url, f"k{attempt}", "100000"], stdout=subprocess.PIPE, text=True
        )
        processes.append(writer)
        assert writer.stdout is not None
        acknowledged = [writer.stdout.readline().strip() for _ in range(3 + attempt)]
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait(timeout=10)
        found = store.read.trajectories(acknowledged)
        assert [t.id for t in found] == acknowledged
        assert {len(t.calls) for t in found} == {10}
    assert store.verify() == []


def test_recent_are_newest_first(store: Store):
    store.write([info("a"), call("c1", "a", at=10.0), info("b"), call("c2", "b", at=20.0)])
    assert [t.id for t in store.read.recent(limit=5)] == ["b", "a"]


def test_counts_tell_why_calls_cannot_be_trained_on(store: Store):
    now = time.time()
    store.write([info(), call("c1", at=now), call("c2", at=now, policy=None, untrainable="answered by upstream")])
    counts = store.read.counts()
    assert (counts["calls"], counts["calls_by_policy"], counts["calls_trainable"]) == (2, 1, 1)
    assert counts["untrainable"] == {"answered by upstream": 1}


def groups(count: int) -> list[Group]:
    return [Group(f"g{n}", f"s{n % 3}", "same_task", (), held_out=n % 5 == 4) for n in range(count)]


def test_what_a_policy_was_trained_on_is_kept(store: Store, execute: Execute):
    store.ledger.add_base("agent@0", "/base", "ff", who="test")
    store.ledger.add_groups(groups(2), now=1.0)
    store.ledger.add_candidate(policy(1), trained_on=["g1", "g0"], who="test")
    assert sorted(execute("SELECT policy, group_id FROM trainings")) == [("agent@1", "g0"), ("agent@1", "g1")]
    assert execute("SELECT DISTINCT state, policy FROM groups") == [("trained", "agent@1")]
    assert store.verify() == []


ODD = "a\0b \ud800 \U0001f600"
"""Text that no database keeps as it is."""


def test_text_that_a_database_cannot_keep_is_no_error(store: Store):
    about = info(ODD, name=ODD, session_id=ODD, user_id=ODD, scenario_key=ODD, tags=(ODD,), metadata={ODD: ODD})
    message = {"role": "user", "content": ODD}
    store.write([about, SpanInfo(ODD, ODD, ODD, 1.0), Score("k", ODD, ODD, 1.0, "user", 3.0, comment=ODD)])
    store.write([call("c1", ODD, messages=(message,), error=ODD, params={"stop": ODD}, requested_model=ODD)])
    (trajectory,) = store.read.recent()
    assert "a" in trajectory.id
    assert trajectory.info.metadata == {ODD: ODD}
    assert trajectory.calls[0].messages == (message,)
    assert trajectory.calls[0].params == {"stop": ODD}
    assert len(trajectory.scores) == 1
    assert store.verify() == []


def test_numbers_of_any_size_are_no_error(store: Store):
    huge = 10**30
    choice = Choice(huge, {"role": "assistant", "content": "yo"}, "stop")
    params = {"seed": huge, "temperature": float("inf")}
    store.write(
        [info(metadata={"loss": float("nan")}), call("c1", prompt_tokens=huge, choices=(choice,), params=params)]
    )
    (trajectory,) = store.read.trajectories(["t1"])
    assert trajectory.calls[0].prompt_tokens == 2**63 - 1
    assert trajectory.calls[0].params == {"seed": huge, "temperature": None}
    assert trajectory.info.metadata == {"loss": None}
