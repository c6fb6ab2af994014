"""The spool: what is in it survives the process, is read once, by one process, and holds nothing that may not stay."""

from __future__ import annotations

import json
import os
import stat
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_patch._lib.faults import faults
from art_patch.errors import StoreError
from art_patch.recording import Exchange, Recorder, spool_directory, take_over
from art_patch.recording.converting import read_call
from art_patch.recording.frames import decode, encode_call, encode_records
from art_patch.recording.spool import create, left_behind
from art_patch.settings import Settings
from art_patch.store import open_store
from art_patch.types import Call, Correction, Record, Score, SpanInfo, TrajectoryInfo
from tests.support.responses import OBJECT
from tests.support.spool_files import ANSWER, Nowhere, asked, left, question

KEY = "sk-proj-abcdefghijklmnopqrstuvwxyz0123456789"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, flush_interval_s=0.01)


@given(
    st.sampled_from(["chat", "completions", "messages", "responses"]),
    OBJECT,
    st.one_of(OBJECT.map(lambda body: json.dumps(body).encode()), st.binary(max_size=200)),
    st.sampled_from(["complete", "closed", "cancelled"]),
    st.booleans(),
)
def test_a_call_is_the_same_from_the_spool(api, request, answer, ended, streamed):
    made = asked(request, answer.replace(b'"error"', b'"err"'), api, ended=ended, streamed=streamed, group_key="g")
    made.trajectory = TrajectoryInfo("t", 1.0, "explicit", tags=("a",), metadata={"n": [1, {"x": None}]})
    again = decode(encode_call(made), Nowhere())
    assert isinstance(again, Exchange)
    assert (read_call(again), again.trajectory, again.group_key, again.run_id) == (
        read_call(made), made.trajectory, "g", made.run_id,
    )  # fmt: skip


def test_records_are_the_same_from_the_spool():
    records: list[Record] = [
        TrajectoryInfo("t", 1.0, "explicit", 2.0, "n", user_id="u", tags=("a", "b"), metadata={"\ud800": float("inf")}),
        SpanInfo("s", "t", "look", 1.5, kind="tool", attributes={"input": {"q": [1, None, "ü"]}}),
        Score("c", "t", "reward", 0.5, "user", 3.0, "fine"),
        Correction("k", "t", 4.0, "user", {"role": "assistant", "content": "so"}),
        read_call(asked(question("hi"), ANSWER)),
    ]
    assert decode(encode_records(records), Nowhere()) == records


def test_what_may_not_stay_is_not_written():
    """Fields that are not on the list, media, and keys in errors, fallbacks and answers that report an error."""
    media = "data:image/png;base64," + "A" * 40_000
    request = question("hi") | {"api_key": "field-1", "extra_headers": {"x": "field-2"}}
    request["messages"].append({"role": "user", "content": [{"type": "image_url", "image_url": {"url": media}}]})
    answer = json.dumps({"error": {"message": f"wrong key {KEY}"}}).encode()
    for ended, error in (("failed", f"401: {KEY}"), ("complete", None)):
        body = encode_call(asked(request, answer, ended=ended, error=error, fallback=f"Bearer {KEY}"))
        for secret in (b"field-1", b"field-2", KEY.encode(), b"A" * 30_000):
            assert secret not in body


def test_files_and_their_directories_are_private(settings):
    old = os.umask(0)
    try:
        path = left(settings)
    finally:
        os.umask(old)
    modes = {stat.S_IMODE(each.stat().st_mode) for each in (path.parent.parent, path.parent)}
    assert (modes, stat.S_IMODE(path.stat().st_mode)) == ({0o700}, 0o600)


def test_a_file_of_a_living_process_is_left_alone_and_one_of_a_dead_process_is_read_once(settings):
    mine = create(settings, b"{}")
    path = left(settings, encode_records([Score("c", "t", "reward", 0.5, "user", 3.0)]))
    first = list(left_behind(settings))
    assert [file.path for file in first] == [path]
    assert list(left_behind(settings)) == []  # another one reads it now
    first[0].let_go()
    sink = Nowhere()
    assert take_over(settings, lambda: sink) == 0
    assert [record.id for record in sink.records] == ["c"]
    assert list(spool_directory(settings).iterdir()) == [mine.path]
    mine.remove()


@given(st.lists(st.integers(0, 400), min_size=1, max_size=6), st.integers(0, 3000), st.integers(0, 255))
def test_a_file_that_ends_or_breaks_anywhere_gives_what_was_whole(tmp_path_factory, sizes, at, byte):
    settings = Settings(home=tmp_path_factory.mktemp("spool"))
    bodies = [bytes([number]) * (size + 1) for number, size in enumerate(sizes)]
    path = left(settings, *bodies)
    whole = path.read_bytes()
    for broken in (whole[:at], whole[:at] + bytes([byte]) + whole[at + 1 :]):
        path.write_bytes(broken)
        (file,) = left_behind(settings)
        found = [body for _, body in file.frames()][1:]
        file.let_go()
        read = [body for body in found if body is not None]
        assert [body for body in bodies if body in read] == read  # in order, and nothing that was not written
        if broken[: len(whole)] == whole:
            assert read == bodies
        elif at >= len(whole) - sum(len(body) + 8 for body in bodies):  # and not in the file's head
            before = sum(
                len(whole) - sum(len(each) + 8 for each in bodies[n:]) <= at for n in range(1, len(bodies) + 1)
            )
            assert read[:before] == bodies[:before]


def test_what_is_finished_is_not_read_again_and_an_empty_file_is_small(settings):
    file = create(settings, b"{}")
    small = file.path.stat().st_size
    places = file.append([b"a", b"b", b"c"])
    file.finished(places[:1])
    file.let_go()
    (again,) = left_behind(settings)
    ends, waiting = zip(*list(again.frames())[1:], strict=True)
    assert waiting == (b"b", b"c")
    again.finished_to(ends[0])
    assert [body for _, body in again.frames()][1:] == [b"c"]
    again.remove()
    mine = create(settings, b"{}")
    mine.finished(mine.append([b"a", b"b"]))
    assert (mine.is_empty, mine.path.stat().st_size) == (True, small)
    mine.remove()


def test_a_conversation_that_was_left_is_stitched_and_sampled_as_its_process_would_have(settings):
    first = question("what is it?")
    said = {"role": "assistant", "content": "it is"}
    second = first | {"messages": [*first["messages"], said, {"role": "user", "content": "why?"}]}
    bodies = [encode_call(asked(each, ANSWER)) for each in (first, second)]
    left(settings, *bodies, *bodies)  # the process was killed before it noted that the store has them
    left(settings, encode_call(asked(question("other"), ANSWER)), rate=0.0)
    with closing(open_store(settings.store_url, project="default")) as store:
        assert take_over(settings, lambda: store) == 0  # all tests take over when they open a store
        (found,) = store.read.recent(limit=10)
        assert [call.messages[-1]["content"] for call in found.calls] == ["what is it?", "why?"]
        assert found.info.origin == "stitched"
        assert store.verify() == []


def test_a_long_file_is_taken_over_whole(settings):
    """In batches, of which each is finished before the next one is read."""
    path = left(
        settings, *[encode_records([Score(f"{number}", "t", "reward", 0.5, "user", 3.0)]) for number in range(100)]
    )
    sink = Nowhere()
    take_over(settings, lambda: sink)
    assert [record.id for record in sink.records] == [str(number) for number in range(100)]
    assert not path.exists()


def test_what_the_store_refuses_is_left_out_and_what_it_cannot_take_stays(settings):
    def score(key: str) -> bytes:
        return encode_records([Score(key, "t", "reward", 0.5, "user", 3.0)])

    path = left(settings, score("a"), score("bad"), score("b"), b"no frame of ours")
    sink = Nowhere()
    sink.down = True
    with pytest.raises(StoreError):
        take_over(settings, lambda: sink)
    assert path.exists()
    sink.down, sink.refused = False, {"bad"}
    faults.clear()
    take_over(settings, lambda: sink)
    assert [record.id for record in sink.records] == ["a", "b"]
    assert (faults.counts, path.exists()) == ({"recording.frame": 1, "store.write": 1}, False)
    faults.clear()


def test_a_full_disk_costs_no_call(settings, monkeypatch):
    """What cannot be spooled is recorded from memory."""

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    faults.clear()
    recorder = Recorder(settings)
    for number in range(3):
        made = Exchange(recorder, "m")
        made.request, made.answer = json.dumps(question(str(number))).encode(), [ANSWER]
        made.finish("complete")
    assert recorder.stop(60)
    monkeypatch.undo()
    with closing(open_store(settings.store_url, create=False)) as store:
        assert len(store.read.recent(limit=10)) == 3
    assert (recorder.dropped, set(faults.counts)) == (0, {"recording.spool"})  # it tries again after a while
    faults.clear()


@pytest.mark.parametrize("redact", [None, "secrets", lambda text: text.replace("2", "***")])
def test_a_backlog_is_read_back_from_the_spool(settings, monkeypatch, redact):
    """Memory is kept for some calls only; the others are read back, redacted as the app wants it."""
    monkeypatch.setattr("art_patch.recording.accounting.KEPT_BYTES", 4_000)
    monkeypatch.setattr("art_patch.recording.spooler.FILE_BYTES", 3_000)
    recorder = Recorder(settings.model_copy(update={"redact": redact}))
    for number in range(40):
        made = Exchange(recorder, "m")
        made.request, made.answer = json.dumps(question(f"{number} {KEY}")).encode(), [ANSWER]
        made.finish("complete")
    assert recorder.stop(60)
    assert list(spool_directory(settings).iterdir()) == []
    with closing(open_store(settings.store_url, create=False)) as store:
        calls = [call for found in store.read.recent(limit=100) for call in found.calls]
    said = sorted(str(call.messages[0]["content"]) for call in calls)
    whole = [f"{number} {KEY}" for number in range(40)]
    if redact == "secrets":
        assert said == sorted(f"{number} ***" for number in range(40))
    else:
        assert said == sorted(whole if redact is None else map(redact, whole))
    assert all(isinstance(call, Call) for call in calls)


def test_without_a_spool_no_file_is_made(settings):
    recorder = Recorder(settings.model_copy(update={"spool_mib": 0}))
    made = Exchange(recorder, "m")
    made.request, made.answer = json.dumps(question("hi")).encode(), [ANSWER]
    made.finish("complete")
    assert recorder.stop(60)
    assert not spool_directory(settings).exists()
