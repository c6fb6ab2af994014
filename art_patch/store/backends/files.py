"""The files of a SQLite store: the lock file, deleted or damaged database files, checkpoints and copies.

SQLite goes on writing without an error to a file that was deleted or replaced under an open connection. So a writer
compares the inode of the open file with the inode at the path, before and after each write, while it holds the lock.

Rules. Every file is made here with mode 600 before SQLite opens it. A `-wal` or `-shm` file is removed only if it
belonged to a database file that is gone from the path. A broken database file is never deleted: it is renamed to
`<name>.corrupt-<UTC time>` together with its `-wal` and `-shm`, and only if it is known to be a store: this process
opened it before, or it has the default name and our lock beside it.

The standard library's `sqlite3` is used here instead of SQLAlchemy. SQLite allows no VACUUM and no checkpoint inside a
transaction, and SQLAlchemy's connections are always in one.
"""

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
    """The database file at one path, its lock file, and the `-wal` and `-shm` files that SQLite keeps beside it.

    The directory and the lock file are made at once; a `StoreError` says that the directory cannot be written.
    """

    def __init__(self, path: Path) -> None:
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
        """Hold the lock that excludes writers in all other processes and threads. A thread may take it repeatedly."""
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
        """Close the lock file. `locked` opens it again when needed."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def begin_in_child(self) -> None:
        """Close the parent's lock file in the child of a fork: a living child would keep the lock of a dead parent."""
        self._inside = threading.RLock()
        self._depth = 0
        self.close()

    # The inodes.

    def remember(self) -> None:
        """Note the inodes of the database, `-wal` and `-shm` files, so that a later replacement can be detected."""
        self._opened = {suffix: _inode_at(f"{self.path}{suffix}") for suffix in ("", *_BESIDE)}

    @property
    def same(self) -> bool:
        """Whether the path still names the file that the connections have open."""
        opened = self._opened.get("")
        return opened is not None and opened == _inode_at(self.path)

    @property
    def replaced(self) -> bool:
        """Whether the file that the connections have open was deleted from the path or replaced by another file."""
        return self._opened.get("") is not None and not self.same

    def forget(self) -> None:
        """Remove the `-wal` and `-shm` of the open database file, after that file was deleted or replaced."""
        # A new database that finds the old `-shm` shares it with processes that still have the old file open.
        for suffix in _BESIDE:
            found = _inode_at(f"{self.path}{suffix}")
            if found is not None and found == self._opened.get(suffix):
                self._unlink(suffix)
        self._opened = {}

    def clear_leftovers(self) -> None:
        """Remove `-wal` and `-shm` if there is no database file, so that a new database does not use old ones."""
        if not self.path.exists():
            for suffix in _BESIDE:
                self._unlink(suffix)

    def make(self) -> None:
        """Make an empty database file with mode 600 if it is missing; the caller holds the lock."""
        with suppress(OSError):  # SQLite says why when it opens the file
            make_private(os.path.realpath(self.path))  # SQLite follows links

    def keep_private(self) -> None:
        """Set mode 600 on the database file and SQLite's files beside it, if this user owns them and it is wider."""
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
        """Whether the file is known to be a store (rules: see the module), so that it may be renamed if corrupt."""
        return self._default or self.same

    def set_aside(self) -> Path:
        """Rename a corrupt database file with its `-wal` and `-shm`, and return its new path; callers hold the lock."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        aside = Path(f"{self.path}.corrupt-{stamp}")
        # The log first: if we die in between, SQLite would replay a log that stayed behind into the new, empty file.
        for suffix in (*_BESIDE, ""):
            with suppress(FileNotFoundError):
                os.rename(f"{self.path}{suffix}", f"{aside}{suffix}")
        return aside


def make_private(path: str | Path) -> None:
    """Make an empty file with mode 600, whatever the umask; `FileExistsError` if it exists, or another `OSError`."""
    # SQLite would make a missing database with the mode that the umask leaves, and its log with the database's mode.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)  # a umask of 777 would lock the owner out too
    finally:
        os.close(descriptor)


def never_close(thing: object) -> None:
    """Keep `thing` from being garbage-collected until the process ends, so that its connections are never closed."""
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
    """Return the size of a file in bytes; 0 if the file does not exist."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


_QUICK_CHECK = "PRAGMA quick_check"
_ROOM = 16 * 2**20

LARGE_LOG = 64 * 2**20  # SQLite itself folds its log into the file at 4 MiB, unless readers never pause


def file_of(url: str) -> Path | None:
    """Return the path of a SQLite store's database file; `None` for a store on a PostgreSQL server."""
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
    """Return a connection that holds the writers' lock. The calling thread must not be in a store transaction."""
    files = StoreFiles(path)
    try:
        with files.locked(), _connected(path) as connection:
            yield connection
    finally:
        files.close()


def truncate_log(connection: sqlite3.Connection) -> bool:
    """Copy the write-ahead log into the database and truncate it; return `False` while another connection reads."""
    (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not busy


def checkpoint_if_large(url: str, limit: int = LARGE_LOG) -> bool:
    """Truncate the log if it is larger than `limit` bytes; return whether it is small now, as on PostgreSQL always."""
    path = file_of(url)
    if path is None or bytes_of(f"{path}-wal") <= limit:
        return True
    with under_the_lock(path) as connection:
        return truncate_log(connection)


def copy_to(path: Path, part: Path) -> None:
    """Copy the store at `path` to the empty file `part`; `StoreError` if that fails or the copy is damaged."""
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
    """Raise `StoreError` without room for a VACUUM, which writes the database to a temporary directory and the log."""
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
