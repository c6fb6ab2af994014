"""Nothing that one project does in a shared store reaches another one: every operation of a store tries it."""

from __future__ import annotations

from pathlib import Path

from art_patch.store import open_store
from tests.support.crossing import MARK, READS, WRITES, crossed, fill, rows_of


def test_no_operation_reaches_another_project(url: str, tmp_path: Path, record_property):
    theirs, mine = open_store(url, project="theirs"), open_store(url, project="mine")
    alone = open_store(f"sqlite:///{tmp_path}/alone.db", project="mine")
    fill(theirs, "zebra", MARK)
    for store in (mine, alone):
        fill(store, "own", "mine")
    assert MARK in repr(theirs.read.recent()), "or nothing could be found"
    assert all(rows_of(mine, "theirs").values()), "each table has rows of theirs"
    found = {name: crossed(mine, alone, theirs, attempt) for name, attempt in (READS | WRITES).items()}
    assert {name: how for name, how in found.items() if how} == {}
    assert len(found) >= 60
    record_property("figure", [f"operations of a store that crossed, of {len(found)}", "0", "0"])
    assert mine.read.counts()["calls"] == 0, "all of it is erased, and of theirs nothing"
    assert theirs.read.counts()["calls"] == 4
    assert len(theirs.read.trajectories(["shared"])[0].calls[0].messages) == 2
    assert mine.verify() == []
    for store in (theirs, mine, alone):
        store.close()
