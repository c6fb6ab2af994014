"""Files of the spool that somebody has planted, cut off or broken: the good ones behind them get to the store."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from art_patch._lib.faults import faults
from art_patch.errors import StoreError
from art_patch.recording import spool_directory, take_over
from art_patch.recording.frames import encode_call, encode_records
from art_patch.recording.spool import create, left_behind
from art_patch.settings import Settings
from art_patch.store import open_store
from art_patch.types import Score
from tests.support.spool_files import ANSWER, Nowhere, asked, left, question


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    faults.clear()
    return Settings(home=tmp_path)


@pytest.fixture(autouse=True)
def nothing_counted():
    yield
    faults.clear()


def score(key: str) -> bytes:
    return encode_records([Score(key, "t", "reward", 0.5, "user", 3.0)])


def renamed(path: Path, name: str) -> Path:
    return path.rename(path.with_name(path.name.partition(".")[0] + f".{name}"))


def framed(head: Any, tail: bytes = b"") -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return len(text).to_bytes(4) + text + tail


def taken(settings: Settings) -> list[str]:
    sink = Nowhere()
    take_over(settings, lambda: sink)
    return [record.id for record in sink.records]


def bound(path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as made:
        made.bind(f"/proc/self/fd/{os.open(path.parent, os.O_RDONLY)}/{path.name}")


NO_FILES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "directory": Path.mkdir,
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "link to a file of the spool": lambda path: path.symlink_to(path.with_name(path.name.replace(".0", ".good"))),
    "socket": bound,
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_is_passed_by(settings, kind):
    good = renamed(left(settings, score("good")), "good")
    NO_FILES[kind](good.with_name(good.name.replace(".good", ".0")))
    assert (taken(settings), faults.counts) == (["good"], {})


def test_a_broken_frame_costs_itself_alone_and_is_told_once(settings, caplog):
    path = renamed(left(settings, score("a"), score("b"), score("c")), "0")
    renamed(left(settings, score("good")), "1")
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"b"', b'"x"'))
    assert taken(settings) == ["a", "c", "good"]
    assert faults.counts == {"recording.frame": 1}
    assert "1 parts of the spool cannot be read or stored; they are lost" in caplog.text
    assert list(spool_directory(settings).iterdir()) == []


@pytest.mark.parametrize("length", [0xFFFFFFFF, 0x7FFFFFFF, 0])
def test_a_length_that_leads_nowhere_ends_a_file(settings, length, caplog):
    path = renamed(left(settings, score("a"), score("b")), "0")
    renamed(left(settings, score("good")), "1")
    at = path.stat().st_size - len(score("b")) - 8
    with path.open("r+b") as file:
        file.seek(at)
        file.write(struct.pack("<I", length))
    assert (taken(settings), faults.counts) == (["a", "good"], {"recording.frame": 1})


@pytest.mark.parametrize("mark", [1 << 40, 1 << 63, (1 << 64) - 1, 0, 9, 41])
def test_a_mark_that_leads_nowhere_costs_nothing(settings, mark):
    path = left(settings, score("a"), score("b"))
    with path.open("r+b") as file:
        file.write(struct.pack("<Q", mark))
    assert taken(settings) == ["a", "b"]


def test_a_file_without_its_first_frame_is_not_read_because_its_sample_rate_is_not_known(settings):
    path = left(settings, score("a"), rate=0.0)
    path.write_bytes(path.read_bytes().replace(b"0.0", b"1.0"))
    assert (taken(settings), faults.counts) == ([], {"recording.frame": 1})


RECORD: dict[str, Any] = json.loads(score("q")[4:])["records"][0][1]
BODIES = {
    "no JSON": framed(b"hello"),
    "a list": framed([1, 2]),
    "nothing": framed(b"null"),
    "deep": framed(b'{"records":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "deep inside a record": framed(b'{"records":[["Score",{"id":' + b"[" * 900 + b"]" * 900 + b"}]]}"),
    "a long head": (1 << 31).to_bytes(4) + b"{}",
    "one byte": b"a",
    "a number of records": framed({"records": 5}),
    "a kind that is a list": framed({"records": [[[], {}]]}),
    "a kind that is a module": framed({"records": [["json", RECORD]]}),
    "a kind that is a text": framed({"records": [["__name__", RECORD]]}),
    "a kind that is a constant": framed({"records": [["UPSTREAM", RECORD]]}),
    "a kind that is a function": framed({"records": [["__getattr__", "os"]]}),
    "a wrong type": framed({"records": [["Score", RECORD | {"value": []}]]}),
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_frame_that_holds_no_record_costs_itself_alone(settings, kind):
    left(settings, score("a"), BODIES[kind], score("b"))
    assert (taken(settings), faults.counts) == (["a", "b"], {"recording.frame": 1})


@pytest.mark.parametrize("fact", ["id", "run_id", "span_id", "started_at", "group_key"])
@pytest.mark.parametrize("value", [1 << 70, "\ud800", [], {"a": {}}, None])
def test_a_call_that_no_driver_can_send_does_not_hold_up_the_others(settings, fact, value):
    """The SQLite driver raises its own errors for whole numbers of more than 64 bits and halves of characters."""
    body = encode_call(asked(question("hostile"), ANSWER))
    length = int.from_bytes(body[:4])
    head = json.loads(body[4 : 4 + length]) | {fact: value}
    renamed(left(settings, framed(head, body[4 + length :])), "0")
    renamed(left(settings, encode_call(asked(question("good"), ANSWER))), "1")
    with closing(open_store(settings.store_url, project="default")) as store:
        take_over(settings, lambda: store)
        said = [call.messages[0]["content"] for found in store.read.recent(limit=9) for call in found.calls]
    assert "good" in said
    assert list(spool_directory(settings).iterdir()) == []


def test_what_the_store_refuses_stays_until_it_takes_something_else(settings):
    """A store that fails for good refuses everything, so a file of which it takes nothing is not dropped at once."""
    bad = renamed(left(settings, score("bad")), "0")
    sink = Nowhere()
    sink.refused = {"bad"}
    for _ in range(2):
        with pytest.raises(StoreError):
            take_over(settings, lambda: sink)
        assert bad.exists()
    renamed(left(settings, score("good")), "1")
    take_over(settings, lambda: sink)
    assert [record.id for record in sink.records] == ["good"]
    assert (list(spool_directory(settings).iterdir()), faults.counts) == ([], {"store.write": 1})


def test_a_store_that_begins_to_refuse_everything_costs_nothing(settings):
    """Its error says nothing of that, as with a file that is corrupt or a role that lost its rights."""
    files = [renamed(left(settings, score(str(number))), str(number)) for number in range(4)]
    sink = Nowhere()
    sink.refused = {"1", "2", "3"}
    with pytest.raises(StoreError):
        take_over(settings, lambda: sink)
    assert [file.exists() for file in files] == [False, True, True, True]
    sink.refused = set()
    take_over(settings, lambda: sink)
    assert [record.id for record in sink.records] == ["0", "1", "2", "3"]


root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@root_only
def test_a_directory_of_another_user_is_neither_written_nor_read(settings):
    """Somebody made it where all users may make directories, before the app did."""
    path = left(settings, score("planted"))
    os.chown(path.parent, 12345, 12345)
    path.parent.chmod(0o777)
    with pytest.raises(PermissionError):
        create(settings, b"{}")
    with pytest.raises(PermissionError):
        taken(settings)
    assert list(path.parent.iterdir()) == [path]


@root_only
def test_a_file_of_another_user_is_not_read(settings):
    path = left(settings, score("planted"))
    path.chmod(0o666)
    os.chown(path, 12345, 12345)
    left(settings, score("good"))
    assert (taken(settings), path.exists()) == (["good"], True)


@root_only
def test_root_takes_over_what_the_owner_of_a_project_left(settings):
    path = left(settings, score("a"))
    for each in (path, *list(path.parents)[:2]):
        os.chown(each, 12345, 12345)
    assert taken(settings) == ["a"]


def test_a_new_password_or_another_name_of_the_file_changes_no_spool(tmp_path):
    server = "postgresql+psycopg://{}db.example:5432/calls{}"
    before = Settings(home=tmp_path, store=server.format("app:old@", ""))
    file = create(before, b"{}")
    file.let_go()
    for login, query, found in (
        ("app:n@w@", "", 0), ("app:new@", "?sslmode=require", 1), ("", "", 1), ("o", "", 0), ("", "?host=else", 0),
    ):  # fmt: skip
        assert len(list(left_behind(Settings(home=tmp_path, store=server.format(login, query))))) == found, login
    (tmp_path / "real").mkdir()
    (tmp_path / "link.db").symlink_to(tmp_path / "real" / "store.db")
    left(Settings(home=tmp_path, store=f"sqlite:///{tmp_path}/link.db"), score("a"))
    assert taken(Settings(home=tmp_path, store=f"sqlite:///{tmp_path}/real/store.db")) == ["a"]
