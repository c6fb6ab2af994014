"""Reading the route while somebody deletes the file and makes it anew."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from art_patch.store import read_route
from art_patch.types import Route

MAKE_AND_DELETE = """
import sqlite3, sys, time
from pathlib import Path
path = Path(sys.argv[1])
for _ in range(80):
    made = sqlite3.connect(path, isolation_level=None)
    made.execute("PRAGMA journal_mode = WAL")
    made.execute("CREATE TABLE control (key TEXT PRIMARY KEY, value TEXT)")
    time.sleep(0.005)
    path.unlink()
    made.close()
    for left in path.parent.glob("store.db-*"):
        left.unlink()
    time.sleep(0.005)
"""


def test_a_file_that_comes_and_goes_is_no_error(tmp_path: Path):
    path = tmp_path / "store.db"
    with subprocess.Popen([sys.executable, "-c", MAKE_AND_DELETE, str(path)]) as maker:
        while maker.poll() is None:
            assert read_route(f"sqlite:///{path}") == Route()
    assert maker.returncode == 0


def test_a_file_that_is_no_database_is_one(tmp_path: Path):
    path = tmp_path / "store.db"
    path.write_bytes(b"no database" * 100)
    with pytest.raises(sqlite3.DatabaseError, match="not a database"):
        read_route(f"sqlite:///{path}")
