"""The files of a SQLite store: the lock, files that were deleted or damaged, and emptying, rewriting and copying.

SQLite goes on writing without an error to a file that was deleted or replaced under an open connection. So a writer
compares inodes before and after each write, under the lock.

Rules. Every file is made here with mode 600 before SQLite opens it. Only the leftovers of the file that this process
had open are removed, and only when that file is gone. A broken file is never deleted: it is renamed to
`<name>.corrupt-<UTC time>` together with its `-wal` and `-shm`, and only if it is known to be a store: this process
opened it before, or it has the default name and our lock beside it.

The standard library's `sqlite3` is used here, because VACUUM and checkpoints are refused inside a transaction and
SQLAlchemy's connections are always in one. It also keeps this module cheap to import.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from art_patch._lib.atomic_files import sync
from art_patch._lib.forking import in_database
from art_patch.errors import StoreError
from art_patch.store.backends.urls import is_postgres, sqlite_path

# The file's name in `Settings.store_url` unless the user sets another URL.
DEFAULT_NAME = "store.db"

_BESIDE = ("-wal", "-shm")

# Endings of the files that hold recorded data: the database and the files that SQLite keeps beside it.
WITH_TRAFFIC = ("", *_BESIDE, "-journal")

_Inode = tuple[int, int]


class StoreFiles:
    """The database file at one path, its lock, and SQLite's files beside it."""

    def __init__(self, path: Path) -> None:
        """Make the directory and the lock file.

        Raises:
            StoreError: if the directory cannot be written.
        """
        self.path = path
        self._lock_path = f"{path}.lock"
        self._opened: dict[str, _Inode | None] = {}
        self._default = path.name == DEFAULT_NAME and os.path.exists(self._lock_path)
        self._lock: int | None = None
        self._inside = threading.RLock()
        self._depth = 0
        self._open_lock()

    # The lock.

    @contextmanager
    def locked(self) -> Generator[None]:
        """Hold the lock of all writers in all processes. It is reentrant, and excludes other threads too."""
        with self._inside:
            if self._depth == 0:
                self._take()
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0 and self._lock is not None:
                    fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _take(self) -> None:
        while True:
            lock = self._open_lock()
            fcntl.flock(lock, fcntl.LOCK_EX)
            # The directory may have been deleted meanwhile. A lock that other processes cannot find excludes nobody.
            if _inode(os.fstat(lock)) == _inode_at(self._lock_path):
                return
            self.close()

    def _open_lock(self) -> int:
        if self._lock is None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                with suppress(FileExistsError):
                    make_private(self._lock_path)
                self._lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise StoreError(
                    f"cannot write the store {self.path}: {error.strerror}; check the directory's owner and mode"
                ) from None
        return self._lock

    def close(self) -> None:
        """Close the lock."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def begin_in_child(self) -> None:
        """Close the parent's lock file in the child of a fork: the child would keep the lock if the parent dies."""
        self._inside = threading.RLock()
        self._depth = 0
        self.close()

    # The inodes.

    def remember(self) -> None:
        """Note the inodes of the files that the connections have open."""
        self._opened = {suffix: _inode_at(f"{self.path}{suffix}") for suffix in ("", *_BESIDE)}

    @property
    def same(self) -> bool:
        """Whether the path names the file that is open."""
        opened = self._opened.get("")
        return opened is not None and opened == _inode_at(self.path)

    @property
    def replaced(self) -> bool:
        """Whether a file is open, and the path names another file or none."""
        opened = self._opened.get("")
        return opened is not None and opened != _inode_at(self.path)

    def forget(self) -> None:
        """Remove what the open file left beside its path, after the file itself was deleted or replaced."""
        # A new database that finds the old `-shm` shares it with processes that still have the old file open.
        for suffix in _BESIDE:
            found = _inode_at(f"{self.path}{suffix}")
            if found is not None and found == self._opened.get(suffix):
                self._unlink(suffix)
        self._opened = {}

    def clear_leftovers(self) -> None:
        """Remove a `-wal` and `-shm` without a database file, for the reason in `forget`."""
        if not self.path.exists():
            for suffix in _BESIDE:
                self._unlink(suffix)

    def make(self) -> None:
        """Make the database file if it is missing; the caller holds the lock."""
        with suppress(OSError):  # SQLite says why when it opens the file
            make_private(os.path.realpath(self.path))  # SQLite follows links

    def keep_private(self) -> None:
        """Remove other users' rights to the store and its log, if this user owns them."""
        path = os.path.realpath(self.path)  # SQLite keeps its log beside the file itself
        for suffix in WITH_TRAFFIC:
            with suppress(OSError):
                found = os.stat(f"{path}{suffix}")
                if found.st_uid == os.geteuid() and found.st_mode & 0o077:
                    os.chmod(f"{path}{suffix}", 0o600)

    def _unlink(self, suffix: str) -> None:
        with suppress(OSError):
            os.unlink(f"{self.path}{suffix}")

    @property
    def may_be_set_aside(self) -> bool:
        """Whether the file is known to be a store."""
        return self._default or self.same

    def set_aside(self) -> Path:
        """Rename the broken file and return its new path; the caller holds the lock."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        aside = Path(f"{self.path}.corrupt-{stamp}")
        # The log first: if we die in between, SQLite would replay a log that stayed behind into the new, empty file.
        for suffix in (*_BESIDE, ""):
            with suppress(FileNotFoundError):
                os.rename(f"{self.path}{suffix}", f"{aside}{suffix}")
        return aside


def make_private(path: str | Path) -> None:
    """Make an empty file with mode 600, whatever the umask.

    Raises:
        OSError: if that fails; `FileExistsError` if there is such a file.
    """
    # SQLite would make a missing database with the mode that the umask leaves, and its log with the database's mode.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)  # a umask of 777 would lock the owner out too
    finally:
        os.close(descriptor)


def never_close(thing: object) -> None:
    """Keep `thing` alive until the process ends, so that its connections are never closed."""
    # Closing the last connection to a database deletes its `-wal` by name. If another file has that name by now, or if
    # the connection was inherited by a fork, that is the log of another database or process.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _inode(found: os.stat_result) -> _Inode:
    return found.st_dev, found.st_ino


def _inode_at(path: str | Path) -> _Inode | None:
    try:
        return _inode(os.stat(path))
    except OSError:
        return None


def bytes_of(path: str | Path) -> int:
    """Return the size of a file, 0 if there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


_QUICK_CHECK = "PRAGMA quick_check"
_ROOM = 16 * 2**20

LARGE_LOG = 64 * 2**20  # SQLite itself folds its log into the file at 4 MiB, unless readers never pause


def file_of(url: str) -> Path | None:
    """Return the file of a SQLite store, `None` for a store on a server."""
    return None if is_postgres(url) else sqlite_path(url)


@contextmanager
def _connected(path: Path) -> Generator[sqlite3.Connection]:
    def look() -> int:
        return 0  # entering Python lets it handle signals, so Ctrl-C ends a statement that runs for minutes

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
    """Return a connection while no process writes. The calling thread must not be in a transaction."""
    files = StoreFiles(path)
    try:
        with files.locked(), _connected(path) as connection:
            yield connection
    finally:
        files.close()


def truncate_log(connection: sqlite3.Connection) -> bool:
    """Fold the log into the file and empty it; return whether that succeeded. An open reader prevents it."""
    (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not busy


def checkpoint_if_large(url: str, limit: int = LARGE_LOG) -> bool:
    """Fold the log into the file if it is larger than `limit`; return whether it is small now."""
    path = file_of(url)
    if path is None or bytes_of(f"{path}-wal") <= limit:
        return True
    with under_the_lock(path) as connection:
        return truncate_log(connection)


def copy_to(path: Path, part: Path) -> None:
    """Copy the store at `path` to the empty file `part`.

    Raises:
        StoreError: if that fails, or the copy is not sound.
    """
    # `sqlite3.Connection.backup` copies page by page and begins again whenever an app writes, so on a busy store it may
    # never end. VACUUM INTO is one read: no app waits, and the log grows meanwhile.
    with _connected(path) as connection:
        connection.execute("VACUUM INTO ?", (str(part),))
    with _connected(part) as copy:
        lines = [line for (line,) in copy.execute(_QUICK_CHECK)]
    if lines != ["ok"]:
        raise StoreError(f"the copy of {path} is not sound ({lines[0]}); `art-patch store verify` says more")
    sync(part)


def check_room(path: Path) -> None:
    """Check that the disks have room for a VACUUM, which writes the file to a temporary directory and to the log.

    Raises:
        StoreError: if one of the disks lacks the room.
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
