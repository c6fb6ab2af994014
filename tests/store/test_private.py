"""Only its owner reads a store's files, from their first byte on, whatever the umask and the directory's mode."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from art_patch.errors import StoreError
from art_patch.store import open_store, read_route
from art_patch.types import Route, TrajectoryInfo
from tests.support.store_samples import call, info

APP = """
import os, sys
from pathlib import Path
os.umask(int(sys.argv[2], 8))
directory = Path(sys.argv[1])

def look(event, arguments):  # before SQLite opens a file: it must be there already, or SQLite makes it as it likes
    if event == "sqlite3.connect" and "mode=" in str(arguments[0]):
        file = str(arguments[0]).removeprefix("file://").partition("?")[0]
        print("connect", Path(file).name, oct(os.stat(file).st_mode & 0o777) if os.path.exists(file) else "missing")
    elif event == "sqlite3.connect":
        print("connect", Path(str(arguments[0])).name, "SQLite may make it")

sys.addaudithook(look)
from art_patch.types import TrajectoryInfo
from art_patch.store import open_store

def show(when):
    for file in sorted(directory.iterdir()):
        print(when, file.name.partition(".corrupt-")[0], oct(file.stat().st_mode & 0o777))

store = open_store(f"sqlite:///{directory}/store.db", trouble=lambda place, error: print(place))
store.write([TrajectoryInfo("t1", 1.0)])
show("open")
store.maintain.backup(directory / "copy.db")
store.maintain.vacuum()
for file in directory.glob("store.db*"):
    if not file.name.endswith(".lock"):
        file.unlink()
store.write([TrajectoryInfo("t2", 1.0)])
show("anew")
store.close()
(directory / "store.db").write_bytes(b"no database at all" * 500)
store = open_store(f"sqlite:///{directory}/store.db", trouble=lambda place, error: print(place))
store.write([TrajectoryInfo("t3", 1.0)])
show("set aside")
store.close()
"""


@pytest.mark.parametrize("umask", ["000", "022", "777"])
def test_every_file_is_private_before_sqlite_opens_it(umask: str, tmp_path: Path):
    directory = tmp_path / "shared"
    directory.mkdir()
    directory.chmod(0o777)
    ran = subprocess.run([sys.executable, "-c", APP, str(directory), umask], capture_output=True, text=True, check=True)
    lines = set(ran.stdout.splitlines())
    assert {line for line in lines if line.startswith("store.")} == {"store.gone", "store.corrupt"}
    seen = {line.rpartition(" ")[0]: line.rpartition(" ")[2] for line in lines if not line.startswith("store.")}
    assert seen.pop("open store.db.lock") == seen.pop("anew store.db.lock") == seen.pop("set aside store.db.lock")
    assert seen == dict.fromkeys(
        {"connect store.db", "connect copy.db.part"}
        | {f"{when} {name}" for when in ("open", "anew") for name in ("store.db", "store.db-shm", "store.db-wal")}
        | {"anew copy.db", "set aside copy.db"}
        | {f"set aside {name}" for name in ("store.db", "store.db-shm", "store.db-wal")},
        "0o600",
    )


def test_a_store_that_others_can_read_is_mended_when_it_is_opened(tmp_path: Path):
    path = tmp_path / "store.db"
    other = open_store(f"sqlite:///{path}")
    other.write([info(), call("c1")])
    files = [path, Path(f"{path}-wal"), Path(f"{path}-shm")]
    for file in files:
        file.chmod(0o644)
    open_store(f"sqlite:///{path}", create=False).close()
    assert [oct(file.stat().st_mode & 0o777) for file in files] == ["0o600"] * 3
    other.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_left_as_it_is(tmp_path: Path):
    path = tmp_path / "store.db"
    open_store(f"sqlite:///{path}").close()
    path.chmod(0o666)
    os.chown(path, 12345, 12345)
    store = open_store(f"sqlite:///{path}")
    store.write([info(), call("c1")])
    assert (path.stat().st_mode & 0o777, path.stat().st_uid) == (0o666, 12345)
    store.close()


def test_a_process_that_died_right_after_it_made_the_file_left_no_store(tmp_path: Path):
    path = tmp_path / "store.db"
    url = f"sqlite:///{path}"
    path.touch(0o600)
    assert read_route(url) == Route()
    with pytest.raises(StoreError, match="there is no store at"):
        open_store(url, create=False)
    assert path.stat().st_size == 0
    store = open_store(url)
    store.write([info(), call("c1")])
    assert store.verify() == []
    store.close()


def test_a_process_that_died_before_the_first_table_left_no_store(tmp_path: Path):
    import sqlite3
    from contextlib import closing

    path = tmp_path / "store.db"
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("PRAGMA journal_mode=WAL")
    assert read_route(f"sqlite:///{path}") == Route()
    with pytest.raises(StoreError, match="there is no store at"):
        open_store(f"sqlite:///{path}", create=False)
    open_store(f"sqlite:///{path}").close()
    open_store(f"sqlite:///{path}", create=False).close()


def test_a_link_to_a_file_that_is_not_there_yet(tmp_path: Path):
    target = tmp_path / "elsewhere" / "data.db"
    target.parent.mkdir()
    path = tmp_path / "store.db"
    path.symlink_to(target)
    before = os.umask(0)
    try:
        store = open_store(f"sqlite:///{path}")
        store.write([TrajectoryInfo("t1", 1.0)])
        assert {file.name: oct(file.stat().st_mode & 0o777) for file in target.parent.iterdir()} == dict.fromkeys(
            ["data.db", "data.db-shm", "data.db-wal"], "0o600"
        )
        store.close()
    finally:
        os.umask(before)


def test_two_that_make_one_store_at_once(tmp_path: Path):
    url, opened = f"sqlite:///{tmp_path}/store.db", []
    threads = [threading.Thread(target=lambda: opened.append(open_store(url))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 4
    for store in opened:
        store.close()
