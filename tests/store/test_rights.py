"""Erasing and retention: all of it goes, only it goes, and what holds copies of it is named."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from art_patch._lib.ids import replay_id
from art_patch.errors import ConfigError
from art_patch.store import Erasure, Store, maintain, open_store
from art_patch.store.erasure import collect, deletion
from art_patch.store.erasure.rights import Pruned, Taught
from art_patch.types import Choice, Group, Score, SpanInfo, TrainedRow, TrajectoryInfo
from tests.support.postgres import Execute
from tests.support.store_samples import call, info, policy


def run_of(key: str, at: float = 1.0, calls: int = 2, **about) -> list:
    """A trajectory with its calls, a span and a score."""
    said = {"role": "user", "content": f"I am {key}"}
    made = [
        call(f"{key}-{number}", key, at=at + number, messages=({"role": "system", "content": "s"}, said) * (number + 1))
        for number in range(calls)
    ]
    score = Score(f"score-{key}", key, "reward", 1.0, "user", at, comment=f"{key} was nice")
    return [info(key, **about), SpanInfo(f"span-{key}", key, "plan", at), *made, score]


def count(execute: Execute, table: str) -> int:
    return execute(f"SELECT count(*) FROM {table}")[0][0]


def actions(execute: Execute) -> list[str]:
    return [row[0] for row in execute("SELECT action FROM audit ORDER BY id")]


@pytest.fixture
def full(store: Store) -> Store:
    """Users u and v; groups that wait, that were trained on, that are u's alone; policies; an export."""
    for key, user in (("u1", "u"), ("u2", "u"), ("u3", "u"), ("v1", "v"), ("v2", "v"), ("v3", "v"), ("v4", "v")):
        store.write(run_of(key, user_id=user, session_id=f"session-{key}"))

    def group(key: str, *members: str) -> Group:
        return Group(key, f"task:{key}", "same_task", store.read.trajectories(members))

    store.ledger.add_groups([group("waits", "u1", "v1"), group("taught", "u2", "v2"), group("own", "u3")], now=1.0)
    store.ledger.add_groups([group("others", "v3", "v4")], now=1.0)
    store.ledger.add_base("agent@0", "/base", "ff", who="test", now=0.0)
    rows = [TrainedRow(f"{key}-0", 0, key, "taught", advantage) for key, advantage in (("u2", 0.5), ("v2", -0.5))]
    store.ledger.add_candidate(policy(1), trained_on=["taught"], rows=rows, who="test")
    store.ledger.move("agent@1", "champion", who="test", reason="won")
    for step, parent in ((2, "agent@1"), (3, "agent@2"), (4, "agent@0")):
        child = policy(step)
        store.ledger.add_candidate(
            type(child)(**{name: getattr(child, name) for name in child.__slots__} | {"parent": parent}),
            trained_on=["others"] if step == 4 else [],
            who="test",
        )
    for path, members in (("/exports/u.jsonl", ["u1", "v1"]), ("/exports/v.jsonl", ["v2"])):
        with store.transfers.note_export(path, "sft", who="test", now=5.0) as note:
            note.add(members)
    return store


TAUGHT = (
    Taught("agent@1", "champion", "trained", True, "/a/agent@1"),
    Taught("agent@2", "candidate", "descends", False, "/a/agent@2"),
    Taught("agent@3", "candidate", "descends", False, "/a/agent@3"),
)


def test_erasing_a_user(full: Store, execute: Execute):
    others = full.read.trajectories(["v1", "v2", "v3", "v4"])
    before = full.read.trajectories(["u1", "u2", "u3"])
    plan = full.rights.erase(user="u", dry_run=True)
    assert (full.read.trajectories(["u1", "u2", "u3"]), actions(execute)[-1]) == (before, "export")
    seen: list[tuple[int, int]] = []
    erasure = full.rights.erase(user="u", who="me", progress=lambda done, total: seen.append((done, total)), now=9.0)
    (export,) = erasure.exports
    assert (export.path, export.format, export.at) == ("/exports/u.jsonl", "sft", 5.0)
    assert erasure == Erasure(
        trajectories=3, calls=6, messages=21, scores=3, spans=3,
        groups=("own", "taught", "waits"), dead_groups=("own", "waits"), exports=(export,), policies=TAUGHT,
    )  # fmt: skip
    assert plan == Erasure(
        trajectories=3, calls=6, messages=None, scores=3, spans=3, groups=erasure.groups,
        dead_groups=erasure.dead_groups, exports=(export,), policies=TAUGHT, dry_run=True,
    )  # fmt: skip
    assert seen[-1] == (3, 3)
    assert full.read.trajectories(["u1", "u2", "u3", "v1", "v2", "v3", "v4"]) == others
    assert full.verify() == []
    assert execute("SELECT id, state, reason FROM groups ORDER BY id") == [
        ("others", "trained", None),
        ("taught", "trained", None),
        ("waits", "dead", "the data of its siblings was erased"),
    ]
    assert execute("SELECT call_id, advantage FROM trained_rows") == [("v2-0", -0.5)]
    assert execute("SELECT key FROM scenarios ORDER BY key") == [("task:others",), ("task:taught",), ("task:waits",)]
    members = "SELECT trajectory_id FROM export_members ORDER BY trajectory_id"
    assert execute(members) == [("v1",), ("v2",)]


def test_runs_that_were_repeated_take_their_repetitions_and_the_copies_of_those_along(store: Store):
    offered = {"replay": {"target": "m:f", "args": ["I am here"], "kwargs": {}}}
    again, other = replay_id("run", 16), replay_id("plain", 1)
    store.write(run_of("run", metadata=offered))
    store.write(run_of(again, at=50.0, metadata={"replay_of": "run"}))
    store.write([info("copy", origin="resampled"), call("c", "copy", at=60.0, shadow_of=f"{again}-0")])
    store.write(run_of("plain") + run_of(other, at=50.0))  # offered nothing, so it has none
    assert store.rights.erase(trajectory="run", who="me", dry_run=True).trajectories == 3
    assert store.rights.prune(older_than_s=45.0, who="me", now=50.0).trajectories == 4
    assert [run.id for run in store.read.recent()] == [other]


def test_the_audit_log_says_that_and_not_whose(full: Store, execute: Execute):
    full.rights.erase(session="session-u1", who="me", now=9.0)
    rows = execute("SELECT who, action, detail FROM audit ORDER BY id DESC LIMIT 2")
    details = [json.loads(one) if isinstance(one, str) else one for _, _, one in rows]
    digest = hashlib.sha256(b"session-u1").hexdigest()
    metrics = {"trajectories": 1, "calls": 2, "messages": 7, "scores": 1, "spans": 1, "groups": 1}
    metrics |= {"corrections": 0, "gate_answers": 0, "judgements": 0}
    assert [(who, action) for who, action, _ in rows] == [("me", "erased"), ("me", "erase")]
    assert details[0] == {"what": "session", "sha256": digest} | metrics
    assert details[1]["sha256"] == digest
    assert "u1" not in json.dumps(details)
    assert full.verify() == []


def test_a_trajectory_goes_with_the_calls_that_copied_it(store: Store, execute: Execute):
    store.write(run_of("t1") + run_of("t2", at=50.0))
    store.write([info("copy", origin="shadow"), call("s1", "copy", at=2.5, shadow_of="t1-1")])
    store.write([info("other", origin="shadow"), call("s2", "other", at=60.0, shadow_of="t2-1")])
    assert store.rights.erase(trajectory="t1").trajectories == 2
    assert execute("SELECT id FROM trajectories ORDER BY id") == [("other",), ("t2",)]
    assert store.verify() == []


@pytest.mark.parametrize("whose", [{"user": "nobody"}, {"session": "none"}, {"trajectory": "t9"}])
def test_what_is_not_there_leaves_an_entry_and_changes_nothing(full: Store, execute: Execute, whose: dict[str, str]):
    before, rows = actions(execute), [count(execute, table) for table in ("trajectories", "calls", "nodes")]
    erasure = full.rights.erase(**whose)
    assert (erasure.found, erasure) == (False, Erasure())
    assert actions(execute) == [*before, "erase", "erased"]
    assert [count(execute, table) for table in ("trajectories", "calls", "nodes")] == rows
    assert full.rights.erase(**whose, dry_run=True) == Erasure(dry_run=True)


@pytest.mark.parametrize("whose", [{"user": "u"}, {"session": "s"}, {"trajectory": "t1"}])
@pytest.mark.parametrize("written_before", [False, True])
def test_what_was_recorded_before_an_erasure_and_comes_later_is_not_written(
    store: Store, url: str, execute: Execute, whose: dict[str, str], written_before: bool
):
    """A process holds calls in its memory and in its spool; a new one takes over what a dead one left."""
    about = {"user_id": "u", "session_id": "s", "name": "n"}
    with closing(open_store(url)) as app:
        if written_before:
            app.write([info("t1", **about), call("first", "t1", at=10.0), info("t2", user_id="v")])
        store.rights.erase(**whose, now=100.0)
        old = [info("t1", **about), call("old", "t1", at=99.0), SpanInfo("old", "t1", "plan", 99.0)]
        app.write([*old, Score("old", "t1", "reward", 1.0, "user", 99.0, comment="mine")])
        assert not store.read.trajectories(["t1"])
        assert [count(execute, table) for table in ("calls", "spans", "scores")] == [0, 0, 0]
        app.write([info("t2", user_id="v"), call("other", "t2", at=99.0)])
        app.write([call("older", "t1", at=50.0), call("new", "t1", at=101.0)])
        app.write([info("t1", **about, ended_at=102.0)])
    (stays, goes_on) = sorted(store.read.trajectories(["t1", "t2"]), key=lambda one: one.id, reverse=True)
    assert ([one.id for one in stays.calls], [one.id for one in goes_on.calls]) == (["other"], ["new"])
    assert tuple(getattr(goes_on.info, name) for name in ("user_id", "session_id", "name", "ended_at")) == (
        "u",
        "s",
        "n",
        102.0,
    )
    assert store.verify() == []


def test_a_copy_of_a_call_that_comes_after_the_erasure_is_not_written(store: Store, execute: Execute):
    store.rights.erase(user="u", now=100.0)
    copy = TrajectoryInfo("copy", 90.0, "shadow", user_id="u")
    store.write([copy, call("copied", "copy", at=90.0, shadow_of="gone")])
    assert count(execute, "calls") == 0


def test_what_an_import_restores_is_written(store: Store):
    store.rights.erase(user="u", now=100.0)
    store.write(run_of("t1", user_id="u"), restores=True)
    assert [len(one.calls) for one in store.read.trajectories(["t1"])] == [2]


@pytest.mark.parametrize("whose", [{}, {"user": "u", "session": "s"}])
def test_exactly_one_subject(store: Store, whose: dict[str, str]):
    with pytest.raises(ConfigError, match="exactly one of user, session and trajectory"):
        store.rights.erase(**whose)


def test_calls_that_arrive_meanwhile_go_too(store: Store, url: str, execute: Execute, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(collect, "BUDGET_S", float("inf"))  # a round is one chunk, however slow the machine
    store.write(run_of("t1", user_id="u"))
    app, arrived = open_store(url), [0]

    def goes_on(_done: int, _total: int) -> None:
        if arrived[0] < 3:
            arrived[0] += 1
            app.write(
                [call(f"late-{arrived[0]}", "t1", at=100.0), Score(f"s{arrived[0]}", "t1", "x", 1.0, "user", 1.0)]
            )
            app.write(run_of(f"new-{arrived[0]}", user_id="u"))

    erasure = store.rights.erase(user="u", progress=goes_on, now=0.5)
    app.close()
    assert (arrived, erasure.calls) == ([3], 2 + 3 + 6)
    # A writer that has seen an erasure writes the trajectory of a late call again: that of the second and the third.
    assert erasure.trajectories == 4 + 2
    tables = ("trajectories", "calls", "choices", "scores", "spans", "nodes", "blobs", "token_blocks")
    assert [count(execute, table) for table in tables] == [0] * len(tables)
    assert store.verify() == []


def test_an_export_that_is_written_meanwhile_is_named(store: Store, url: str, execute: Execute):
    store.write(run_of("t1", user_id="u"))

    def exports(_done: int, _total: int) -> None:
        if not store.transfers.exports():
            with store.transfers.note_export("/late.jsonl", "chat", who="x") as note:
                note.add(["t1"])

    assert [one.path for one in store.rights.erase(user="u", progress=exports).exports] == ["/late.jsonl"]
    assert count(execute, "export_members") == 0


def test_chunks_leave_the_store_sound_and_the_lock_free(
    store: Store, url: str, execute: Execute, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(deletion, "_CALLS", 25)
    store.write(run_of("t1", calls=30, user_id="u") + run_of("t2", calls=30, user_id="u"))
    app, rounds = open_store(url), [0]

    def others_write(_began: float) -> None:
        rounds[0] += 1
        app.write(run_of(f"v{rounds[0]}", user_id="v"))
        assert store.verify() == []

    ticks = iter(range(10**9))
    monkeypatch.setattr(deletion.time, "perf_counter", lambda: next(ticks) * collect.BUDGET_S / 8)
    monkeypatch.setattr(collect, "breathe", others_write)
    erasure = store.rights.erase(user="u")
    app.close()
    assert (erasure.trajectories, erasure.calls) == (2, 60)
    assert rounds[0] > 5
    assert (count(execute, "trajectories"), store.verify()) == (rounds[0], [])


ERASER = """
import sys, time
from art_patch.store import open_store
from art_patch.store.erasure import collect, deletion
deletion._TRAJECTORIES, collect.BUDGET_S = 1, 0.0
left = int(sys.argv[2])
def tell(done, total):
    global left
    left -= 1
    if not left:
        print(done, flush=True)
        time.sleep(600)  # it is killed here
open_store(sys.argv[1]).rights.erase(user="u", progress=tell)
"""


@pytest.mark.parametrize("after", [1, 3, 6])
def test_killed_in_the_middle_and_run_again_it_finishes(
    full: Store, url: str, execute: Execute, processes: list[subprocess.Popen[str]], after: int
):
    eraser = subprocess.Popen([sys.executable, "-c", ERASER, url, str(after)], stdout=subprocess.PIPE, text=True)
    processes.append(eraser)
    assert eraser.stdout is not None
    assert eraser.stdout.readline()
    os.kill(eraser.pid, signal.SIGKILL)
    eraser.wait(timeout=10)
    assert full.verify() == []
    erasure = full.rights.erase(user="u")
    assert (erasure.finishes, erasure.found) == (True, True)
    assert [one.path for one in erasure.exports] == ["/exports/u.jsonl"]
    assert erasure.policies == TAUGHT
    assert execute("SELECT count(*) FROM trajectories WHERE user_id = 'u'") == [(0,)]
    assert actions(execute)[-3:] == ["erase", "erase", "erased"]
    assert execute("SELECT value FROM control WHERE key = 'collecting'") in ([], [("",)])
    assert count(execute, "nodes") == sum(len(t.calls[-1].messages) + 4 for t in full.read.recent()) - 3
    assert full.verify() == []
    assert not full.rights.erase(user="u").found


def test_nothing_of_it_is_left_in_the_files(sqlite_url: str):
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    store = open_store(sqlite_url)
    for number in range(150):
        store.write(run_of(f"t{number}", user_id=f"someone-{number}"))
        if number % 10 == 0:
            key = f"gone-{number}"
            mine = run_of(key, user_id="CANARY-USER", name="CANARY-NAME", session_id="CANARY-SESSION")
            secret = {"role": "user", "content": "CANARY-TEXT " + "".join(f"{n * n:x}" for n in range(400))}
            broken = call(
                f"{key}-x", key, messages=(secret,), choices=(Choice(0, secret, "stop"),), error="CANARY-ERROR"
            )
            store.write([*mine, broken])
            # Written again, the row grows, and its old place in the page is free.
            store.write([info(key, user_id="CANARY-USER", ended_at=9.0, error="ValueError: CANARY-ERROR" * 20)])
    with closing(sqlite3.connect(path)) as raw:
        canaries = [b"CANARY-USER", b"CANARY-NAME", b"CANARY-SESSION", b"CANARY-ERROR", b"gone-0"]
        canaries += [row[0][8:] for row in raw.execute("SELECT body FROM nodes WHERE length(body) > 300")]
    assert len(canaries) > 5

    def found() -> list[bytes]:
        files = [file for file in path.parent.iterdir() if file.name.startswith(path.name)]
        contents = [file.read_bytes() for file in files]
        return [canary for canary in canaries if any(canary in content for content in contents)]

    assert found() == canaries
    erasure = store.rights.erase(user="CANARY-USER")
    assert (erasure.trajectories, erasure.scrubbed, found()) == (15, True, [])
    assert store.verify() == []
    store.close()


def test_a_reader_that_holds_on_to_the_log_is_told_of(sqlite_url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(maintain, "_TRIES", 2)
    store = open_store(sqlite_url)
    store.write(run_of("t1", user_id="u"))
    with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM calls").fetchall()
        assert not store.rights.erase(user="u").scrubbed
    store.close()


# Retention.


def test_what_is_too_old_goes_by_its_last_call_else_by_its_start(store: Store, execute: Execute):
    store.write(run_of("old", at=10.0) + run_of("new", at=100.0) + [info("empty")])
    plan = store.rights.prune(older_than_s=50.0, now=100.0, dry_run=True)
    assert plan == Pruned(trajectories=2, calls=2, messages=None, scores=1, spans=1, dry_run=True)
    pruned = store.rights.prune(older_than_s=50.0, now=100.0)
    assert pruned == Pruned(trajectories=2, calls=2, messages=7, scores=1, spans=1)
    assert [t.id for t in store.read.recent()] == ["new"]
    assert store.rights.prune(older_than_s=50.0, now=100.0) == Pruned()
    assert (store.verify(), actions(execute)) == ([], ["prune"])


def test_the_newest_are_kept_shadow_calls_not_counted(store: Store, execute: Execute):
    for number in range(6):
        store.write(run_of(f"t{number}", at=10.0 * (number // 2), calls=1))  # two at a time are equally old
    store.write([info("copy", origin="shadow"), call("s", "copy", at=45.0)])
    store.write([info("first", origin="shadow"), call("s0", "first", at=1.0)])
    assert store.rights.prune(keep=3).trajectories == 4
    assert [row[0] for row in execute("SELECT id FROM trajectories ORDER BY id")] == ["copy", "t3", "t4", "t5"]
    assert store.rights.prune(keep=3) == Pruned()
    assert store.rights.prune(keep=0).trajectories == 3
    assert [row[0] for row in execute("SELECT id FROM trajectories")] == ["copy"]
    assert store.verify() == []


def test_groups_that_wait_for_training_are_no_exception(store: Store, execute: Execute):
    store.write(run_of("old", at=10.0) + run_of("new", at=100.0))
    store.ledger.add_groups([Group("g", "task:x", "same_task", store.read.trajectories(["old", "new"]))], now=1.0)
    assert store.rights.prune(older_than_s=50.0, now=100.0).dead_groups == 1
    assert execute("SELECT state, reason FROM groups") == [("dead", "its siblings are older than what is kept")]


def test_what_was_called_again_meanwhile_is_spared(store: Store, execute: Execute, monkeypatch: pytest.MonkeyPatch):
    store.write(run_of("a", at=10.0) + run_of("b", at=10.0))
    before = deletion.Deletion.delete

    def called_again(self, ids, only=None):
        store.write([call("b-9", "b", at=99.0)])
        before(self, ids, only)

    monkeypatch.setattr(deletion.Deletion, "delete", called_again)
    assert store.rights.prune(older_than_s=50.0, now=100.0).trajectories == 1
    assert [t.id for t in store.read.recent()] == ["b"]


def test_retention_needs_a_limit_that_can_be(store: Store):
    with pytest.raises(ConfigError, match="an age, a number"):
        store.rights.prune()
    with pytest.raises(ConfigError, match="negative"):
        store.rights.prune(keep=-1)
