"""What is true of a store in a file only."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from art_patch.errors import NotFound, StoreError
from art_patch.store import open_store
from tests.support.command_line import art_patch, says


@pytest.fixture
def url(sqlite_url: str) -> str:
    return sqlite_url


def test_the_file_is_private(url: str):
    open_store(url).close()
    path = Path(url.removeprefix("sqlite:///"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_missing_file_is_not_made_by_readers(url: str):
    with pytest.raises(NotFound, match="there is no store"):
        open_store(url, create=False)
    assert not Path(url.removeprefix("sqlite:///")).exists()


def test_a_store_that_cannot_be_reached_is_not_called_missing(tmp_path: Path):
    """A link to itself stands for a mount that is gone, or a directory that is closed to this user."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    result = art_patch("status", "--store", f"sqlite:///{loop}/store.db", home=tmp_path)
    says(result, StoreError.exit_code, "see that this user can read it")


def test_what_is_no_store_is_left_alone(tmp_path: Path):
    text = tmp_path / "notes.txt"
    text.write_text("these are my notes, not a database at all\n" * 50)
    text.chmod(0o644)
    with pytest.raises(StoreError, match="not a database"):
        open_store(f"sqlite:///{text}")
    assert text.read_text().startswith("these are my notes")
    assert text.stat().st_mode & 0o777 == 0o644
    other = tmp_path / "other.db"
    with closing(sqlite3.connect(other)) as raw, raw:
        raw.execute("CREATE TABLE mine (x)")
    other.chmod(0o644)
    with pytest.raises(StoreError, match="not a store of art_patch"):
        open_store(f"sqlite:///{other}")
    assert other.stat().st_mode & 0o777 == 0o644


def test_an_unwritable_directory_is_named(tmp_path: Path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StoreError, match="check the directory's owner and mode"):
        open_store(f"sqlite:///{blocked}/store.db")


def test_verify_asks_sqlite_itself(url: str):
    store = open_store(url)
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as raw, raw:
        raw.execute("PRAGMA writable_schema = ON")
        raw.execute("UPDATE sqlite_master SET rootpage = 3 WHERE name = 'nodes_parent'")
    store.close()
    reopened = open_store(url)
    assert any(line.startswith("sqlite: ") for line in reopened.verify())
    reopened.close()


def test_a_full_disk_may_pass_and_a_wrong_value_does_not(url: str):
    with closing(open_store(url)) as store:
        with pytest.raises(StoreError, match="free some disk space") as full, store._database.write() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")  # SQLite reports the same as on a full disk
            connection.exec_driver_sql("CREATE TABLE filler AS SELECT zeroblob(1000000) AS x")
        with pytest.raises(StoreError) as wrong, store._database.write() as connection:
            connection.exec_driver_sql("INSERT INTO blobs (id, body) VALUES (NULL, NULL)")
        assert (full.value.may_pass, wrong.value.may_pass) == (True, False)
