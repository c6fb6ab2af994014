"""What nothing refers to goes, and only that, whoever else writes meanwhile."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from art_patch.store import Store, open_store
from art_patch.store.erasure import collect
from art_patch.store.erasure.collect import COLLECTED, PENDING, collect_all
from art_patch.trajectories import ROOT, node_id
from art_patch.types import Call, Choice, TrajectoryInfo
from tests.support.postgres import Execute
from tests.support.store_samples import TOOLS, call, info

USERS = ("ada", "bob", "eve")

ORPHANS = (
    'SELECT count(*) FROM nodes n WHERE NOT EXISTS (SELECT 1 FROM nodes c WHERE c.parent = n.id) AND NOT EXISTS '
    '(SELECT 1 FROM calls WHERE prompt = n.id) AND NOT EXISTS (SELECT 1 FROM choices WHERE answer = n.id)',
    'SELECT count(*) FROM token_blocks b WHERE NOT EXISTS (SELECT 1 FROM token_blocks c WHERE c.parent = b.id) '
    'AND NOT EXISTS (SELECT 1 FROM calls WHERE prompt_block = b.id)',
    'SELECT count(*) FROM blobs b WHERE NOT EXISTS (SELECT 1 FROM calls WHERE tools = b.id)',
)  # fmt: skip


def orphans(execute: Execute) -> list[int]:
    return [execute(query)[0][0] for query in ORPHANS]


def control(execute: Execute, key: str) -> str:
    return (execute(f"SELECT value FROM control WHERE key = '{key}'") or [("",)])[0][0]


def message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def conversation(words: list[int]) -> tuple[dict[str, str], ...]:
    return tuple(message(f"word {word}") for word in words)


# Few words and short conversations, so that most of them share their beginnings.
conversations = st.lists(
    st.tuples(
        st.sampled_from(USERS),
        st.lists(st.integers(0, 2), max_size=5),
        st.lists(st.integers(0, 2), max_size=2),
        st.sampled_from([0, 300, 700]),
        st.booleans(),
    ),
    max_size=14,
)


def records(drawn, prefix: str):
    made = []
    for number, (user, words, answers, ids, tools) in enumerate(drawn):
        key = f"{prefix}{number}"
        made.append(TrajectoryInfo(key, 1.0, user_id=user))
        choices = tuple(Choice(i, message(f"word {word}"), "stop") for i, word in enumerate(answers))
        mine = ({"type": "function", "function": {"name": user}},) if tools else ()
        made.append(
            call(f"{prefix}c{number}", key, messages=conversation(words), choices=choices, tools=mine,
                 prompt_token_ids=tuple(range(ids)) or None, span_id=None)
        )  # fmt: skip
    return made


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(first=conversations, second=conversations, erased=st.sets(st.sampled_from(USERS)))
def test_whoever_is_erased_the_others_read_back_whole_and_no_orphan_is_left(
    store: Store, execute: Execute, first, second, erased: set[str]
):
    for table in ("nodes", "token_blocks", "blobs", "calls", "choices", "trajectories"):
        execute(f"DELETE FROM {table}")
    with collect.alone(store._database) as connection:
        collect.note_collected(connection)  # or the writer would believe in what the last example wrote
    written = records(first, "a")
    store.write(written)
    for user in erased:
        found = store.rights.erase(user=user, now=0.5)  # before the calls that are written later
        assert found.trajectories == sum(one.user_id == user for one in written if isinstance(one, TrajectoryInfo))
    assert orphans(execute) == [0, 0, 0]
    later = records(second, "b")  # a writer must not believe that what it wrote before is there still
    store.write(later)
    assert store.verify() == []
    owner = {one.id: one.user_id for one in (*written, *later) if isinstance(one, TrajectoryInfo)}
    left = {one.trajectory_id: one for one in (*written, *later) if isinstance(one, Call)}
    left = {key: one for key, one in left.items() if key[0] == "b" or owner[key] not in erased}
    assert {t.id: t.calls for t in store.read.trajectories(list(owner))} == {key: (one,) for key, one in left.items()}
    for user in USERS:
        store.rights.erase(user=user, now=0.5)
    assert [execute(f"SELECT count(*) FROM {table}")[0][0] for table in ("nodes", "token_blocks", "blobs")] == [0] * 3


def test_a_collection_that_was_cut_short_is_ended_by_the_next(
    store: Store, execute: Execute, monkeypatch: pytest.MonkeyPatch
):
    store.write([info(), call("c1", messages=conversation(list(range(30))))])
    execute("DELETE FROM choices")
    answers = [row[0] for row in execute("SELECT id FROM nodes WHERE id NOT IN (SELECT parent FROM nodes)")]
    monkeypatch.setattr(collect, "climb", lambda *_: Counter())  # it gets no further than taking the candidates down

    def killed(_began: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(collect, "breathe", killed)
    with collect.alone(store._database) as connection:
        pending = collect.Pending.load(connection)
        pending.add("nodes", [bytes(one) for one in answers])
        pending.save(connection)
    with pytest.raises(KeyboardInterrupt):
        collect.collect(store._database)
    assert "nodes" in control(execute, PENDING)
    assert execute("SELECT count(*) FROM nodes") == [(32,)]
    monkeypatch.undo()
    assert collect.collect(store._database)["nodes"] == 2
    assert (control(execute, PENDING), store.verify()) == ("", [])


def test_a_collection_without_time_gets_on_by_a_step_a_transaction(
    store: Store, execute: Execute, monkeypatch: pytest.MonkeyPatch
):
    store.write([info(), call("c1", messages=conversation(list(range(30))))])
    execute("DELETE FROM choices")
    execute("DELETE FROM calls")
    answers = [bytes(row[0]) for row in execute("SELECT id FROM nodes WHERE id NOT IN (SELECT parent FROM nodes)")]
    transactions = [0]

    def counted(_began: float) -> None:
        transactions[0] += 1
        assert transactions[0] < 100

    monkeypatch.setattr(collect, "BUDGET_S", -1.0)
    monkeypatch.setattr(collect, "breathe", counted)
    assert collect.collect(store._database, {"nodes": answers})["nodes"] == 32
    assert (count_of_nodes(execute), store.verify()) == (0, [])
    assert transactions[0] > 10


def count_of_nodes(execute: Execute) -> int:
    return execute("SELECT count(*) FROM nodes")[0][0]


def test_candidates_that_somebody_needs_stay(store: Store, execute: Execute):
    store.write([info(), call("c1"), call("c2", at=2.0)])
    everything = {"nodes": [bytes(row[0]) for row in execute("SELECT id FROM nodes")], "blobs": [b"\x00" * 16]}
    before = control(execute, COLLECTED)
    assert not collect.collect(store._database, everything).total()
    assert control(execute, COLLECTED) == before
    assert store.verify() == []


def test_each_transaction_that_deletes_tells_writers(store: Store, execute: Execute):
    store.write([info(), call("c1")])
    execute("DELETE FROM choices")
    execute("DELETE FROM calls")
    leaf = node_id(ROOT, call("c1").messages[0])
    for number, kind, ids in ((1, "nodes", [leaf]), (2, "blobs", [])):
        if ids:  # its child still refers to it
            assert not collect.collect(store._database, {kind: ids}).total()
            assert control(execute, COLLECTED) == ""
        else:
            gone = collect_all(store._database)
            assert (gone["nodes"], gone["blobs"]) == (4, 1)
            assert int(control(execute, COLLECTED)) >= number
    store.write([info(), call("c1")])
    assert store.read.trajectories(["t1"])[0].calls == (call("c1"),)
    assert store.verify() == []


def test_the_full_sweep_finds_what_nobody_told_of(store: Store, execute: Execute, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(collect, "_BLOBS_AT_ONCE", 2)
    for number in range(5):
        tools = ({"type": "function", "function": {"name": f"f{number}"}},)
        words = [1, 2, number, 4]
        store.write([info(f"t{number}"), call(f"c{number}", f"t{number}", messages=conversation(words), tools=tools,
                                              prompt_token_ids=tuple(range(number, 600)))])  # fmt: skip
    execute("DELETE FROM choices WHERE call_id != 'c3'")
    execute("DELETE FROM calls WHERE id != 'c3'")
    assert min(orphans(execute)) > 0
    gone = collect_all(store._database)
    assert (gone["blobs"], orphans(execute)) == (4, [0, 0, 0])
    assert execute("SELECT count(*) FROM nodes") == [(6,)]
    execute("DELETE FROM trajectories WHERE id != 't3'")
    assert store.verify() == []


def test_tools_that_another_call_has_stay(store: Store, execute: Execute):
    store.write([info("a"), call("c1", "a"), info("b"), call("c2", "b", at=2.0)])
    store.rights.erase(trajectory="a")
    assert execute("SELECT count(*) FROM blobs") == [(1,)]
    assert store.read.trajectories(["b"])[0].calls[0].tools == TOOLS
    store.rights.erase(trajectory="b")
    assert execute("SELECT count(*) FROM blobs") == [(0,)]


SHARING_WRITER = """
import sys
from art_patch.types import Call, Choice, TrajectoryInfo
from art_patch.store import open_store
store, me = open_store(sys.argv[1]), sys.argv[2]
say = lambda text: {"role": "user", "content": text}
print("ready", flush=True)
for number in range(int(sys.argv[3])):
    for user in ("stays", "goes"):
        # All of them share their beginning, and half of the rest, across users and processes.
        words = [say("system"), say(f"topic {number % 3}"), say(f"detail {number % 7}"), say(f"{number} {me}")]
        t = f"{me}-{user}-{number}"
        calls = [Call(f"{t}-{turn}", t, float(number), "m", tuple(words[: turn + 1]),
                      (Choice(0, say(f"answer {number % 5}"), "stop"),),
                      tools=({"type": "function", "function": {"name": f"f{number % 4}"}},),
                      prompt_token_ids=tuple(range(100 * turn + number % 3)))
                 for turn in range(4)]
        store.write([TrajectoryInfo(t, float(number), user_id=user), *calls])
print("done", flush=True)
"""

ERASER = """
import sys
from art_patch.store import open_store
from art_patch.store.erasure.collect import collect_all
store = open_store(sys.argv[1])
print("ready", flush=True)
rounds = 0
while not sys.stdin.closed:
    store.rights.erase(user="goes")
    collect_all(store._database)
    rounds += 1
    print(rounds, flush=True)
"""


def test_writers_and_an_eraser_do_not_hurt_each_other(
    store: Store, url: str, execute: Execute, processes: list[subprocess.Popen[str]]
):
    def start(code: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, url, *arguments], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
        )
        processes.append(process)
        return process

    eraser = start(ERASER)
    writers = [start(SHARING_WRITER, name, "40") for name in ("w1", "w2")]
    for writer in writers:
        out, _ = writer.communicate(timeout=120)
        assert (writer.returncode, out.split()) == (0, ["ready", "done"])
    assert eraser.stdout is not None
    assert [eraser.stdout.readline() for _ in range(2)] == ["ready\n", "1\n"]  # it got round at least once
    eraser.kill()  # in the middle of whatever it does
    eraser.wait(timeout=10)
    assert store.verify() == []
    store.rights.erase(user="goes")
    collect_all(store._database)
    assert store.verify() == []
    assert orphans(execute) == [0, 0, 0]
    keys = [f"{name}-stays-{number}" for name in ("w1", "w2") for number in range(40)]
    found = store.read.trajectories(keys)
    assert [t.id for t in found] == keys
    assert {len(t.calls) for t in found} == {4}
    assert {len(call.messages) for t in found for call in t.calls[3:]} == {4}
    assert all(call.tools and len(call.choices) == 1 for t in found for call in t.calls)
    assert execute("SELECT count(*) FROM trajectories") == [(80,)]


def test_a_store_opened_anew_goes_on_with_what_was_left(url: str, execute: Execute):
    first = open_store(url)
    first.write([info(user_id="u"), call("c1", messages=conversation([1, 2, 3]))])
    leaf = node_id(ROOT, message(f"nobody {uuid.uuid4()}"))
    with collect.alone(first._database) as connection:
        pending = collect.Pending.load(connection)
        pending.add("nodes", [leaf, ROOT, None])
        pending.save(connection)
    first.close()
    second = open_store(url)
    second.rights.erase(user="u")
    assert (control(execute, PENDING), orphans(execute)) == ("", [0, 0, 0])
    second.close()
