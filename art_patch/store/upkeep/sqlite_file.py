"""What an operator does to SQLite's file: emptying its log, writing it anew, copying it.

By the standard library's module, because SQLAlchemy's connections always are in a transaction, where SQLite refuses
these. Whoever writes does it under the lock of all writers; a copy needs none.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from art_patch._lib.atomic_files import sync
from art_patch._lib.forking import in_database
from art_patch.errors import StoreError
from art_patch.store.backends.database import Database
from art_patch.store.backends.files import StoreFiles, bytes_of
from art_patch.store.backends.urls import is_postgres, sqlite_path

_QUICK_CHECK = "PRAGMA quick_check"
_ROOM = 16 * 2**20

LARGE_LOG = 64 * 2**20
"""SQLite folds its log into the file at 4 MiB, unless somebody reads all the time."""


def file_of(database: Database) -> Path | None:
    """Return the file of a SQLite store, `None` for any other."""
    return None if is_postgres(database.url) else sqlite_path(database.url)


@contextmanager
def _connected(path: Path) -> Generator[sqlite3.Connection]:
    def look() -> int:
        return 0  # Python takes signals in here, so that Ctrl-C ends a statement that runs for minutes

    try:
        with in_database():
            connection = sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=0, isolation_level=None)
            try:
                connection.set_progress_handler(look, 1_000_000)
                connection.execute("PRAGMA synchronous=FULL")
                connection.execute("PRAGMA secure_delete=ON")
                yield connection
            finally:
                connection.close()
    except sqlite3.Error as error:
        if "interrupted" in str(error):
            raise KeyboardInterrupt from None
        raise StoreError(f"store {path}: {error}; try again, or free some disk space if it is full") from error


@contextmanager
def under_the_lock(path: Path) -> Generator[sqlite3.Connection]:
    """A connection while no process writes. The thread must not be in a transaction of its own."""
    files = StoreFiles(path)
    try:
        with files.locked(), _connected(path) as connection:
            yield connection
    finally:
        files.close()


def truncate_log(connection: sqlite3.Connection) -> bool:
    """Fold the log into the file and empty it; return whether nobody who reads held on to it."""
    (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not busy


def checkpoint_if_large(database: Database, limit: int = LARGE_LOG) -> bool:
    """Fold the log into the file if it is larger than `limit`; return whether it is small now.

    One `stat` where it is not. A log that stays large is being read: the next call tries again.
    """
    path = file_of(database)
    if path is None or bytes_of(f"{path}-wal") <= limit:
        return True
    with under_the_lock(path) as connection:
        return truncate_log(connection)


def copy_to(path: Path, part: Path) -> None:
    """Copy the store at `path` to `part`, which is there and empty.

    Raises:
        StoreError: if that fails, or the copy is not sound.
    """
    # Page by page, `sqlite3.Connection.backup` begins anew whenever an app writes, so it may never end. This is one
    # read: the log grows meanwhile, and nobody waits.
    with _connected(path) as connection:
        connection.execute("VACUUM INTO ?", (str(part),))
    with _connected(part) as copy:
        lines = [line for (line,) in copy.execute(_QUICK_CHECK)]
    if lines != ["ok"]:
        raise StoreError(f"the copy of {path} is not sound ({lines[0]}); `art-patch store verify` says more")
    sync(part)


def check_room(path: Path) -> None:
    """SQLite writes the file twice: to its temporary directory, and to the log.

    Raises:
        StoreError: if one of them lacks the room.
    """
    size = bytes_of(path) + bytes_of(f"{path}-wal") + _ROOM
    places = (os.environ.get("SQLITE_TMPDIR"), os.environ.get("TMPDIR"), "/var/tmp", "/usr/tmp", "/tmp")
    scratch = next((Path(place) for place in places if place and os.path.isdir(place)), path.parent)
    needs = {path.parent: size, scratch: size}
    if path.parent.stat().st_dev == scratch.stat().st_dev:
        needs = {path.parent: 2 * size}
    for place, need in needs.items():
        free = shutil.disk_usage(place).free
        if free < need:
            raise StoreError(
                f"a vacuum needs {need / 2**20:,.0f} MiB free in {place}, and there are {free / 2**20:,.0f}; "
                "free some, or set SQLITE_TMPDIR to a directory on another disk"
            )
