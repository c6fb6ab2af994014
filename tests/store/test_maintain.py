"""Sizes, vacuum, backups and the log."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from art_patch.errors import StoreError
from art_patch.store import Store, maintain, open_store
from art_patch.store.backends import files
from art_patch.store.backends.files import checkpoint_if_large
from art_patch.store.maintain import Table
from art_patch.store.schema.tables import metadata
from tests.support.postgres import Execute
from tests.support.store_samples import call, info


@pytest.fixture
def sqlite_store(sqlite_url: str):
    opened = open_store(sqlite_url)
    yield opened
    opened.close()


@pytest.fixture
def path(sqlite_url: str) -> Path:
    return Path(sqlite_url.removeprefix("sqlite:///"))


def fill(store: Store, trajectories: int = 20) -> None:
    for number in range(trajectories):
        said = {"role": "user", "content": f"{number} " * 2_000}
        store.write([info(f"t{number}"), call(f"c{number}", f"t{number}", at=float(number), messages=(said,))])


def test_stats_of_an_empty_store(store: Store):
    stats = store.maintain.stats()
    assert set(stats.tables) == set(metadata.tables)
    of_the_store = {"projects": 1, "agents": 1}
    assert {name: table.rows for name, table in stats.tables.items() if table.rows} == of_the_store
    assert (stats.kib_per_trajectory, stats.compression, stats.first_call_at) == (None, None, None)
    assert stats.bytes > 0


def test_stats_say_what_is_there_and_what_it_costs(store: Store):
    fill(store)
    store.write([info("copy", origin="shadow"), call("s", "copy", at=99.0, shadow_of="c1")])
    stats = store.maintain.stats()
    assert (stats.tables["calls"].rows, stats.tables["nodes"].rows, stats.trajectories) == (21, 64, 20)
    assert (stats.first_call_at, stats.last_call_at) == (0.0, 99.0)
    assert stats.compression is not None and stats.compression > 10
    assert stats.kib_per_trajectory == pytest.approx((stats.bytes + stats.wal_bytes) / 20 / 1024)
    sizes = [table.bytes for table in stats.tables.values() if table.bytes is not None]
    assert sum(sizes) <= stats.bytes or stats.free_bytes > 0


def test_stats_without_dbstat(sqlite_store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(maintain, "_DBSTAT", "no_such_table")
    fill(sqlite_store, 1)
    assert sqlite_store.maintain.stats().tables["calls"] == Table(1, None)


def test_vacuum_deletes_orphans(store: Store, execute: Execute):
    fill(store)
    for table in ("choices", "calls", "trajectories"):
        execute(f"DELETE FROM {table}")
    done = store.maintain.vacuum()
    assert (done.messages, done.tools) == (60, 1)
    assert store.maintain.vacuum().messages == 0
    assert store.verify() == []


def test_vacuum_gives_the_space_back(sqlite_store: Store, path: Path):
    fill(sqlite_store, 100)
    sqlite_store.rights.prune(keep=1)
    done = sqlite_store.maintain.vacuum()
    assert done.bytes_after < done.bytes_before
    assert done.bytes_after == path.stat().st_size
    assert sqlite_store.maintain.stats().free_bytes == 0
    fill(sqlite_store, 1)  # connections that were open go on
    assert sqlite_store.verify() == []


def test_vacuum_without_room_says_how_much_it_needs(sqlite_store: Store, monkeypatch: pytest.MonkeyPatch):
    fill(sqlite_store, 1)
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _place: usage._replace(free=1_000_000))
    with pytest.raises(StoreError, match=r"needs \d+ MiB free in .*and there are 1; free some"):
        sqlite_store.maintain.vacuum()
    assert sqlite_store.verify() == []


def test_a_backup_is_a_whole_store_that_only_its_owner_reads(sqlite_store: Store, tmp_path: Path):
    fill(sqlite_store)
    target = tmp_path / "copy.db"
    assert sqlite_store.maintain.backup(target) == target.stat().st_size
    assert target.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["copy.db"]
    copy = open_store(f"sqlite:///{target}", create=False)
    ids = [f"t{number}" for number in range(20)]
    assert copy.read.trajectories(ids) == sqlite_store.read.trajectories(ids)
    assert copy.verify() == []
    copy.close()


def test_a_backup_while_an_app_writes(sqlite_store: Store, sqlite_url: str, tmp_path: Path):
    fill(sqlite_store, 5)
    app = open_store(sqlite_url)
    with app._database.write() as connection:  # in the middle of a transaction, lock held
        connection.exec_driver_sql("INSERT INTO control VALUES ('x', 'y', 1.0, 1, 0)")
        sqlite_store.maintain.backup(tmp_path / "copy.db")
    app.close()
    with closing(sqlite3.connect(tmp_path / "copy.db")) as copy:
        assert copy.execute("SELECT count(*) FROM calls").fetchone() == (5,)
        assert copy.execute("SELECT count(*) FROM control WHERE key = 'x'").fetchone() == (0,)


def test_a_backup_overwrites_nothing(sqlite_store: Store, tmp_path: Path):
    target = tmp_path / "copy.db"
    target.write_text("precious")
    with pytest.raises(StoreError, match=r"copy\.db exists, and a backup overwrites nothing"):
        sqlite_store.maintain.backup(target)
    assert target.read_text() == "precious"


@pytest.mark.parametrize("cause", ["directory", "unsound"])
def test_a_backup_that_fails_leaves_nothing(
    sqlite_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str
):
    fill(sqlite_store, 1)
    target = (tmp_path / "missing" if cause == "directory" else tmp_path) / "copy.db"
    if cause == "unsound":
        monkeypatch.setattr(files, "_QUICK_CHECK", "SELECT 'row 3 missing from index'")
    words = {"directory": "No such file", "unsound": "is not sound .*row 3"}[cause]
    with pytest.raises(StoreError, match=words):
        sqlite_store.maintain.backup(target)
    assert [file for file in tmp_path.rglob("copy*")] == []


def test_a_left_over_part_of_a_killed_backup_is_in_nobodys_way(sqlite_store: Store, tmp_path: Path):
    (tmp_path / "copy.db.part").write_text("half")
    sqlite_store.maintain.backup(tmp_path / "copy.db")
    assert not (tmp_path / "copy.db.part").exists()


def test_postgres_is_backed_up_by_its_own_tool(postgres_url: str, tmp_path: Path):
    store = open_store(postgres_url.replace("postgres@", "postgres:s3cret@"))
    with pytest.raises(StoreError) as error:
        store.maintain.backup(tmp_path / "copy.dump")
    store.close()
    assert f"pg_dump --format=custom --file={tmp_path}/copy.dump --host=" in str(error.value)
    assert "--username=postgres --dbname=test_" in str(error.value)
    assert "s3cret" not in str(error.value)


def test_a_large_log_is_folded_in(sqlite_store: Store):
    fill(sqlite_store)
    size = sqlite_store.maintain.wal_bytes()
    assert size > 0
    assert checkpoint_if_large(sqlite_store._database.url, limit=size)
    assert sqlite_store.maintain.wal_bytes() == size
    assert checkpoint_if_large(sqlite_store._database.url, limit=size - 1)
    assert sqlite_store.maintain.wal_bytes() == 0


def test_a_log_that_somebody_reads_stays(sqlite_store: Store, path: Path):
    fill(sqlite_store)
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM calls").fetchone()
        assert not checkpoint_if_large(sqlite_store._database.url, limit=0)
    fill(sqlite_store, 21)
    assert checkpoint_if_large(sqlite_store._database.url, limit=0)
    assert sqlite_store.verify() == []


def test_a_server_has_no_log_of_ours(postgres_url: str):
    store = open_store(postgres_url)
    assert (store.maintain.wal_bytes(), checkpoint_if_large(store._database.url, limit=0)) == (0, True)
    store.close()


def test_a_store_that_cannot_be_written_is_named(sqlite_store: Store, path: Path):
    if os.geteuid() == 0:
        pytest.skip("root writes everything")
    fill(sqlite_store, 1)
    path.chmod(0o400)
    with pytest.raises(StoreError, match=str(path)):
        sqlite_store.maintain.vacuum()
