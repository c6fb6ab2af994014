"""The store through its public interface: what goes in comes out whole, and nothing is lost or torn."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art_patch.chain import canonical
from art_patch.errors import ConfigError, StoreError, StoreTooNew, TransitionError
from art_patch.records import Call, Choice, Group, Policy, Route, Score, SpanInfo, Trajectory, TrajectoryInfo
from art_patch.store import Store, open_store
from art_patch.store.route import read_route

TOOLS = ({"type": "function", "function": {"name": "lookup"}},)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/deep/store.db"


@pytest.fixture
def store(url: str):
    opened = open_store(url)
    yield opened
    opened.close()


def call(key: str, trajectory: str = "t1", at: float = 1.0, **changes) -> Call:
    values = {
        "id": key,
        "trajectory_id": trajectory,
        "started_at": at,
        "duration_ms": 5.0,
        "ttft_ms": 1.5,
        "requested_model": "gpt-5",
        "policy": "agent@0",
        "messages": ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi \u00e9 \U0001f600"}),
        "tools": TOOLS,
        "params": {"temperature": 0.5, "n": 2},
        "choices": (
            Choice(0, {"role": "assistant", "content": "yo"}, "stop", (1, 2, 4_000_000_000), (-0.5, -1.5, 0.0)),
            Choice(1, {"role": "assistant", "content": "hey"}, "stop", (9,), (-0.25,)),
        ),
        "prompt_token_ids": (5, 6, 7),
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "span_id": "s1",
    }
    return Call(**(values | changes))


def info(key: str = "t1", **changes) -> TrajectoryInfo:
    return TrajectoryInfo(key, 1.0, **changes)


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
    store.write([about, SpanInfo("s1", "t1", "plan", 1.0), first, follow_up, score])
    assert store.read.trajectories(["t1", "unknown"]) == (Trajectory(about, (first, follow_up), (score,)),)
    assert store.verify() == []


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


def test_shared_history_is_kept_once(store: Store, url: str):
    history: tuple[dict[str, str], ...] = ()
    for turn in range(20):
        history = (*history, {"role": "user", "content": f"turn {turn}"})
        answer = {"role": "assistant", "content": f"answer {turn}"}
        store.write([info(), call(f"c{turn}", at=float(turn), messages=history, choices=(Choice(0, answer, "stop"),))])
        history = (*history, answer)
    (trajectory,) = store.read.trajectories(["t1"])
    assert trajectory.calls[-1].messages == history[:-1]
    with sqlite3.connect(url.removeprefix("sqlite:///")) as raw:
        assert raw.execute("SELECT count(*) FROM nodes").fetchone() == (40,)


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


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "name"]), json_values), max_size=5))
def test_any_json_messages_survive(tmp_path_factory: pytest.TempPathFactory, messages: list[dict[str, object]]):
    opened = open_store(f"sqlite:///{tmp_path_factory.mktemp('any')}/store.db")
    opened.write([info(), call("c1", messages=tuple(messages), choices=())])
    (trajectory,) = opened.read.trajectories(["t1"])
    assert [canonical(m) for m in trajectory.calls[0].messages] == [canonical(m) for m in messages]
    assert opened.verify() == []
    opened.close()


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


def policy(step: int, state: str = "candidate") -> Policy:
    return Policy(f"agent@{step}", "/base", "ff", state, float(step), path=f"/a/agent@{step}", parent="agent@0")  # type: ignore[arg-type]


def test_a_promotion_moves_the_route_and_retires_the_old_champion(store: Store, url: str):
    ledger = store.ledger
    assert read_route(url) == Route()
    ledger.add_base("agent@0", "/base", "ff", who="test", now=0.0)
    ledger.set_engine("http://127.0.0.1:1/v1", key_file="/k", who="test", now=4.0)
    ledger.add_candidate(policy(1), trained_on=[], who="test")
    ledger.move("agent@1", "champion", who="me", reason="won", figures={"difference": 0.2}, now=5.0)
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
        (1, "retired", "only become champion or rejected"),
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
    with pytest.raises(StoreError, match="art-patch status"):
        store.ledger.move("agent@7", "champion", who="me", reason="x")


def test_verify_finds_what_was_tampered_with(store: Store, url: str):
    store.write([info(), call("c1")])
    store.ledger.add_base("agent@0", "/base", "ff", who="test")
    with sqlite3.connect(url.removeprefix("sqlite:///")) as raw:
        raw.execute("UPDATE audit SET who = 'nobody' WHERE id = 1")
        raw.execute("DELETE FROM nodes WHERE parent != x''")
        raw.execute("INSERT INTO choices (call_id, \"index\", answer) VALUES ('gone', 0, x'00')")
    found = "\n".join(store.verify())
    assert "audit entry 1 was altered" in found
    assert "1 answers whose call is missing" in found
    assert "calls whose prompt is missing" in found


def test_the_file_is_private(store: Store, url: str):
    path = Path(url.removeprefix("sqlite:///"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("bad", ["mysql://x/y", "sqlite:///", "store.db"])
def test_an_unknown_url_is_refused(bad: str):
    with pytest.raises(ConfigError, match="sqlite:////absolute"):
        open_store(bad)


def test_a_missing_store_is_not_made_by_readers(url: str):
    with pytest.raises(StoreError, match="there is no store"):
        open_store(url, create=False)
    assert not Path(url.removeprefix("sqlite:///")).exists()


def test_what_is_no_store_is_left_alone(tmp_path: Path):
    text = tmp_path / "notes.txt"
    text.write_text("these are my notes, not a database at all\n" * 50)
    with pytest.raises(StoreError, match="not a database"):
        open_store(f"sqlite:///{text}")
    assert text.read_text().startswith("these are my notes")
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as raw:
        raw.execute("CREATE TABLE mine (x)")
    with pytest.raises(StoreError, match="not a store of art_patch"):
        open_store(f"sqlite:///{other}")


def test_a_newer_store_is_refused(store: Store, url: str):
    with sqlite3.connect(url.removeprefix("sqlite:///")) as raw:
        raw.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(StoreTooNew, match="newer release"):
        open_store(url)


def test_an_unwritable_directory_is_named(tmp_path: Path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StoreError, match="check the directory's owner and mode"):
        open_store(f"sqlite:///{blocked}/store.db")


def test_migrations_make_exactly_the_declared_tables(url: str):
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory
    from sqlalchemy import create_engine

    import art_patch.store.migrations as migrations
    from art_patch.store.tables import HEAD, metadata

    open_store(url).close()
    engine = create_engine(url)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()
    assert ScriptDirectory(str(Path(migrations.__file__).parent)).get_current_head() == HEAD


WRITER = """
import sys
from art_patch.records import Call, Choice, TrajectoryInfo
from art_patch.store import open_store
store, me = open_store(sys.argv[1]), sys.argv[2]
for batch in range(int(sys.argv[3])):
    t = f"{me}-{batch}"
    calls = [Call(f"{t}-{i}", t, float(batch), "m", ({"role": "user", "content": f"{t} {i}"},),
                  (Choice(0, {"role": "assistant", "content": "ok"}, "stop"),)) for i in range(10)]
    store.write([TrajectoryInfo(t, float(batch)), *calls])
    print(t, flush=True)
"""


def test_four_processes_write_at_once_and_nothing_is_lost(store: Store, url: str):
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, url, f"w{n}", "25"], stdout=subprocess.DEVNULL)
        for n in range(4)
    ]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0, 0]
    assert store.read.counts()["calls"] == 4 * 25 * 10
    assert store.verify() == []


def test_a_killed_writer_tears_nothing_and_loses_nothing_acknowledged(store: Store, url: str):
    for attempt in range(5):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, url, f"k{attempt}", "100000"], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        acknowledged = [writer.stdout.readline().strip() for _ in range(3 + attempt)]
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait(timeout=10)
        writer.stdout.close()
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
