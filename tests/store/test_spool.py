"""The spool: what a process left of its records is written by whoever opens the store next."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from art_patch.errors import StoreError, WrongProject
from art_patch.store import open_store
from art_patch.store.spool import Spool, take_over, waiting_bytes
from art_patch.types import AppReport, Call, Choice, Correction, Record, Score, SpanInfo, TrajectoryInfo

INFO = TrajectoryInfo("t", 1.0, tags=("a", "b"), metadata={"deep": {"list": [1, [2]]}})
CALL = Call(
    "c",
    "t",
    1.5,
    "m",
    messages=({"role": "user", "content": [{"type": "text", "text": "h\u00e9\ud800\n"}]},),
    choices=(Choice(0, {"role": "assistant", "content": "x"}, "stop", (1, 2), (-0.5, float("-inf"))),),
    tools=({"type": "function"},),
    params={"stop": ["a"]},
    prompt_token_ids=(3, 4),
)
OTHERS: list[Record] = [
    SpanInfo("s", "t", "tool", 1.0, attributes={"input": [1]}),
    Score("x", "t", "reward", 1.0, "user", 2.0),
    Correction("k", "t", 2.0, "user", {"role": "assistant", "content": "better"}),
]
ALL: list[Record] = [INFO, CALL, *OTHERS]
BIG = 1 << 20


class Taken:
    """A store that takes everything but records whose id is in `refuses`."""

    def __init__(self, refuses: Sequence[str] = ()) -> None:
        self.records: list[Record] = []
        self.refuses = refuses

    def write(self, records: Sequence[Record]) -> None:
        if any(record.id in self.refuses for record in records):
            raise StoreError("refused")
        self.records += records


def ended(spool: Spool) -> None:
    """What the kernel does when the process ends."""
    spool.let_go()


def test_what_a_process_left_is_written_once_and_its_file_deleted(tmp_path: Path):
    spool, store = Spool(tmp_path, BIG), Taken()
    spans = spool.append(ALL)
    assert all(spans)
    assert spool.read([span for span in spans if span]) == ALL
    assert take_over(tmp_path, store.write) == 0  # its process lives
    assert waiting_bytes(tmp_path) > 100
    ended(spool)
    assert take_over(tmp_path, store.write) == len(ALL)
    assert store.records == ALL
    assert list(tmp_path.iterdir()) == []
    assert take_over(tmp_path, store.write) == 0


def test_only_what_the_store_has_not_is_written(tmp_path: Path):
    spool, store = Spool(tmp_path, BIG), Taken()
    spans = spool.append(ALL)
    assert spans[2] is not None
    spool.done(spans[2].start)
    ended(spool)
    take_over(tmp_path, store.write)
    assert store.records == ALL[2:]


def test_what_the_store_has_does_not_stay_on_the_disk(tmp_path: Path):
    spool = Spool(tmp_path, BIG)
    spool.append(ALL)
    spool.done()
    (file,) = tmp_path.iterdir()
    assert b"user" not in file.read_bytes()
    assert waiting_bytes(tmp_path) == 0
    spool.append([INFO])
    ended(spool)
    store = Taken()
    take_over(tmp_path, store.write)
    assert store.records == [INFO]


def test_a_clean_end_leaves_no_file(tmp_path: Path):
    spool = Spool(tmp_path, BIG)
    spool.append(ALL)
    spool.done()
    spool.close()
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_private_from_its_first_byte(tmp_path: Path):
    directory = tmp_path / "spools"
    before = os.umask(0)
    try:
        Spool(directory, BIG).append(ALL)
    finally:
        os.umask(before)
    (file,) = directory.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_record_that_is_cut_or_altered_ends_the_file(tmp_path: Path):
    for damage in (lambda text: text[:-5], lambda text: text[:-40] + b"?" + text[-39:]):
        spool = Spool(tmp_path, BIG)
        spool.append(ALL)
        ended(spool)
        (file,) = tmp_path.iterdir()
        file.write_bytes(damage(file.read_bytes()))
        store = Taken()
        take_over(tmp_path, store.write)
        assert store.records == ALL[:-1]


def test_a_full_spool_keeps_nothing_more_and_says_so(tmp_path: Path):
    spool = Spool(tmp_path, 2_000)
    assert all(spool.append(ALL))
    assert spool.append(ALL) == [None] * len(ALL)
    assert spool.trouble == "the spool is full"
    spool.done()
    assert all(spool.append(ALL))
    assert spool.trouble is None


def test_a_directory_that_cannot_be_written_is_told_and_not_raised(tmp_path: Path):
    (tmp_path / "file").write_text("")
    spool = Spool(tmp_path / "file", BIG)
    assert spool.append(ALL) == [None] * len(ALL)
    assert spool.trouble == f"{tmp_path / 'file'} cannot be written (File exists)"


def test_a_deleted_spool_is_made_again(tmp_path: Path):
    spool, store = Spool(tmp_path, BIG), Taken()
    spool.append([INFO])
    next(tmp_path.iterdir()).unlink()
    assert all(spool.append([CALL]))
    ended(spool)
    take_over(tmp_path, store.write)
    assert store.records == [CALL]


def test_what_is_no_json_is_not_kept_and_the_rest_is(tmp_path: Path):
    odd = TrajectoryInfo("odd", 1.0, metadata={"x": object()})
    report = AppReport("host:1", 1.0, {})
    spool = Spool(tmp_path, BIG)
    kept = spool.append([INFO, odd, report, CALL])
    assert [bool(span) for span in kept] == [True, False, False, True]


def test_a_record_that_the_store_refuses_does_not_hold_up_the_others(tmp_path: Path):
    spool, store = Spool(tmp_path, BIG), Taken(refuses=["c"])
    spool.append(ALL)
    ended(spool)
    assert take_over(tmp_path, store.write) == len(ALL) - 1
    assert store.records == [INFO, *OTHERS]
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_is_down_leaves_the_file(tmp_path: Path):
    spool, store = Spool(tmp_path, BIG), Taken(refuses=[record.id for record in ALL])
    spool.append(ALL)
    ended(spool)
    with pytest.raises(StoreError):
        take_over(tmp_path, store.write)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_link_is_not_followed_and_a_strange_file_gives_nothing(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("x")
    spools = tmp_path / "spools"
    spools.mkdir()
    (spools / "a.spool").symlink_to(secret)
    (spools / "b.spool").write_bytes(b"\0" * 100)
    assert take_over(spools, Taken().write) == 0
    assert secret.read_text() == "x"
    assert not (spools / "b.spool").exists()


CHILD = """
import sys, time
from pathlib import Path
from art_patch.store.spool import Spool
from art_patch.types import TrajectoryInfo
spool = Spool(Path(sys.argv[1]), 1 << 30)
n = 0
while True:
    spool.append([TrajectoryInfo(str(n + k), 1.0, name="x" * 500) for k in range(7)])
    n += 7
    print(n, flush=True)
"""


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.05])
def test_a_killed_process_loses_nothing_that_it_had_spooled(tmp_path: Path, after_s: float):
    with subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(after_s)
        child.send_signal(signal.SIGKILL)
        told = [7, *map(int, child.stdout.read().split("\n")[:-1])][-1]
    store = Taken()
    take_over(tmp_path, store.write)
    ids = [int(record.id) for record in store.records]
    assert ids == list(range(len(ids)))
    assert len(ids) >= told


def test_a_forked_child_leaves_the_parents_lock(tmp_path: Path):
    spool, store = Spool(tmp_path, BIG), Taken()
    spool.append(ALL)
    child = os.fork()
    if child == 0:
        spool.let_go()
        os._exit(take_over(tmp_path, store.write))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert all(spool.append(ALL))
    ended(spool)
    assert take_over(tmp_path, store.write) == 2 * len(ALL)


texts = some.text(some.characters(codec=None), max_size=20)
json_values: Any = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats(allow_nan=False) | texts,
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
objects = some.dictionaries(texts, json_values, max_size=3)
choices = some.builds(
    Choice, some.integers(0, 3), objects, texts, some.none() | some.tuples(some.integers()), some.none()
)
calls = some.builds(
    Call, texts, texts, some.floats(0, 1e10), texts, some.tuples(objects), choices=some.tuples(choices), params=objects
)
infos = some.builds(TrajectoryInfo, texts, some.floats(0, 1e10), name=texts, tags=some.tuples(texts), metadata=objects)


@given(some.lists(calls | infos, min_size=1, max_size=5))
def test_every_record_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, records: list[Record]):
    directory = tmp_path_factory.mktemp("spools")
    spool, store = Spool(directory, BIG), Taken()
    assert all(spool.append(records))
    ended(spool)
    take_over(directory, store.write)
    assert store.records == records


def left_behind(store: Path, project: str, records: Sequence[Record]) -> Path:
    """What a process of this project leaves if it is killed."""
    directory = Path(f"{store}.spool") / project
    spool = Spool(directory, BIG)
    spool.append(records)
    ended(spool)
    return directory


def test_opening_a_store_writes_what_was_left_for_its_project_and_no_other(tmp_path: Path):
    path = tmp_path / "store.db"
    open_store(f"sqlite:///{path}", project="shop").close()
    ours, others = left_behind(path, "shop", [INFO, CALL]), left_behind(path, "bank", [INFO, CALL])
    with closing(open_store(f"sqlite:///{path}", create=False)) as store:
        assert [found.id for found in store.read.recent(limit=9)] == ["t"]
    assert (list(ours.iterdir()), len(list(others.iterdir()))) == ([], 1)
    with pytest.raises(WrongProject):
        open_store(f"sqlite:///{path}", project="bank")
    assert len(list(others.iterdir())) == 1


@pytest.mark.parametrize("project", ["shop", None])
def test_a_store_that_no_process_had_time_to_create_is_created(tmp_path: Path, project: str | None):
    path = tmp_path / "store.db"
    left_behind(path, "shop", [INFO, CALL])
    with closing(open_store(f"sqlite:///{path}", create=False, project=project)) as store:
        assert [found.id for found in store.read.recent(limit=9)] == ["t"]


def test_without_anything_left_a_missing_store_stays_missing(tmp_path: Path):
    path = tmp_path / "store.db"
    left_behind(path, "bank", [INFO])
    with pytest.raises(StoreError, match="there is no store"):
        open_store(f"sqlite:///{path}", create=False, project="shop")
    assert not path.exists()


def test_what_a_killed_process_left_of_a_user_is_erased_with_the_user(tmp_path: Path):
    path = tmp_path / "store.db"
    open_store(f"sqlite:///{path}", project="shop").close()
    directory = left_behind(path, "shop", [replace(INFO, user_id="u1"), CALL])
    with closing(open_store(f"sqlite:///{path}", project="shop")) as store:
        store.rights.erase(user="u1", who="test")
        assert list(store.read.recent(limit=9)) == []
    assert list(directory.iterdir()) == []
