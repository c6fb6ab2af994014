"""The files of a store: which ones we opened, the lock beside them, and what is done when they are gone or broken.

SQLite notices none of this by itself: it goes on writing, with success, to a file that was deleted or replaced under
an open connection. So whoever writes compares inodes before and after, under the lock.

Rules. Every file is made here, for its owner alone, before SQLite opens it: SQLite makes a missing file with whatever
mode the umask leaves, and gives the log the mode of the database. Only the leftovers of the very file that we had open
are removed, and only when that file is gone. A broken file is never deleted: it is renamed to `<name>.corrupt-<UTC
time>`, its `-wal` and `-shm` along with it, and only if it is known to have been a store of ours: this process opened
it before, or it has the default name and our lock beside it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from art_patch.errors import StoreError

DEFAULT_NAME = "store.db"
"""What `Settings.store_url` calls the file unless told otherwise."""

_BESIDE = ("-wal", "-shm")

WITH_TRAFFIC = ("", *_BESIDE, "-journal")
"""Endings of the files that hold what was recorded: the database and what SQLite keeps beside it."""

_Inode = tuple[int, int]


class StoreFiles:
    """The database file at one path, with what SQLite and we put beside it."""

    def __init__(self, path: Path) -> None:
        """Make the directory and the lock.

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
        """Hold the lock that all writers of all processes share; this process's threads exclude each other too."""
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
            # Somebody may have deleted the directory meanwhile: a lock that others cannot find excludes nobody.
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
        """Let go of the parent's lock after a fork: while a child keeps it open, it outlives a parent that dies."""
        self._inside = threading.RLock()
        self._depth = 0
        self.close()

    # The inodes.

    def remember(self) -> None:
        """Take down which files the connections have open."""
        self._opened = {suffix: _inode_at(f"{self.path}{suffix}") for suffix in ("", *_BESIDE)}

    @property
    def same(self) -> bool:
        """Whether the path still names the file that is open."""
        opened = self._opened.get("")
        return opened is not None and opened == _inode_at(self.path)

    @property
    def replaced(self) -> bool:
        """Whether the path names another file, or none, than the one that is open."""
        opened = self._opened.get("")
        return opened is not None and opened != _inode_at(self.path)

    def forget(self) -> None:
        """The file that was open is gone: remove what it left beside the path.

        A new database that found the old one's `-shm` would share it with whoever still has the old one open.
        """
        for suffix in _BESIDE:
            found = _inode_at(f"{self.path}{suffix}")
            if found is not None and found == self._opened.get(suffix):
                self._unlink(suffix)
        self._opened = {}

    def clear_leftovers(self) -> None:
        """Remove what lies beside a database file that does not exist, for the same reason."""
        if not self.path.exists():
            for suffix in _BESIDE:
                self._unlink(suffix)

    def make(self) -> None:
        """Make the database file if there is none. Where that fails SQLite says why when it opens it. Hold the lock."""
        with suppress(OSError):
            make_private(os.path.realpath(self.path))  # SQLite follows links

    def keep_private(self) -> None:
        """Take other users' rights to the file, once it is known to be a store, and to its log, if they are ours."""
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
        """Whether the file is known to have been a store of ours."""
        return self._default or self.same

    def set_aside(self) -> Path:
        """Rename the broken file; return its new path. Hold the lock."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        aside = Path(f"{self.path}.corrupt-{stamp}")
        # The log first: SQLite would play it into the new, empty file.
        for suffix in (*_BESIDE, ""):
            with suppress(FileNotFoundError):
                os.rename(f"{self.path}{suffix}", f"{aside}{suffix}")
        return aside


def make_private(path: str | Path) -> None:
    """Make an empty file that only its owner may read and write, whatever the umask.

    Raises:
        OSError: it cannot be made; `FileExistsError` if it is there.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)  # a umask of 777 would keep the owner out, too
    finally:
        os.close(descriptor)


def never_close(thing: object) -> None:
    """Keep `thing` alive even while the interpreter goes down.

    Closing the last connection to a database deletes its `-wal` by name. If another file has that name by now, or if
    the connection was inherited from the parent process, that would be somebody else's log.
    """
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
