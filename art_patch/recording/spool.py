"""The spool: files that hold recorded calls from a few milliseconds after their end until the store has them.

A process appends to files of its own, `store.db-spool/<project>.<random>` beside the store, mode 600. It holds the lock
(`flock`) of such a file for as long as it lives, however it ends; whoever gets the lock may take the file over. The
lock belongs to an open file and not to a process number, so containers that share a directory cannot mistake one
another.

A file begins with the place of its first frame that is not in the store yet. Then come frames: length, CRC-32, bytes.
The first frame describes the process; what is in the others, `frames.py` decides. A write that a kill cut short leaves
a frame with a wrong length or CRC at the end; it is not read. A file is emptied whenever the store has all of it.

What stands in a file is believed no more than its user: it is data, its lengths and places are checked, and a file or
directory of another user is not used.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from art_patch._lib.forking import in_database
from art_patch._lib.os_threads import RLock
from art_patch.errors import ConfigError
from art_patch.settings import Settings
from art_patch.store import is_postgres, postgres_parameters, sqlite_path

_FRAME = struct.Struct("<II")
_MARK = struct.Struct("<Q")

# A process with a backlog begins a new file after so many bytes, so that the space of what was written is given back.
FILE_BYTES = 16 << 20


class SpoolFile:
    """A file of the spool whose lock this process holds. One thread appends, one reads and finishes frames."""

    _close = staticmethod(os.close)  # `__del__` may come when the interpreter has taken the modules apart

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._begins = self.end = 0
        self._lock = RLock()
        # Where the frames begin that are not in the store, in order.
        self._waiting: dict[int, None] = {}
        _open.add(self)

    def __del__(self) -> None:
        """Leave what waits to the next one who takes over, as a process that ends."""
        self.let_go()

    def begin(self, description: bytes) -> None:
        """Write the first frame of a new file."""
        os.write(self._fd, _MARK.pack(0))
        self.end = _MARK.size
        self.append([description])
        self._waiting.clear()
        self._begins = self.end
        os.pwrite(self._fd, _MARK.pack(self._begins), 0)

    def append(self, bodies: Sequence[bytes]) -> list[int]:
        """Append frames with one write and return where they begin; an `OSError` leaves the file as it was."""
        parts = [part for body in bodies for part in (_FRAME.pack(len(body), zlib.crc32(body)), body)]
        with self._lock:
            places, at = list[int](), self.end
            for body in bodies:
                places.append(at)
                at += _FRAME.size + len(body)
            try:
                data = memoryview(b"".join(parts))
                while data:
                    data = data[os.pwrite(self._fd, data, at - len(data)) :]
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._fd, self.end)
                raise
            self.end = at
            self._waiting.update(dict.fromkeys(places))
        return places

    def read(self, place: int) -> bytes | None:
        """Return the frame that begins there; `None` if there is no whole one."""
        length, crc = _FRAME.unpack(os.pread(self._fd, _FRAME.size, place).ljust(_FRAME.size, b"\0"))
        body = os.pread(self._fd, length, place + _FRAME.size)
        return body if body and len(body) == length and zlib.crc32(body) == crc else None

    def finished(self, places: Sequence[int]) -> None:
        """Note that the store has these frames, or that they are dropped; empty the file if it has no others."""
        with self._lock:
            for place in places:
                self._waiting.pop(place, None)
            if not (self._waiting or self.is_gone):
                os.ftruncate(self._fd, self._begins)
                self.end = self._begins
            os.pwrite(self._fd, _MARK.pack(next(iter(self._waiting), self.end)), 0)

    @property
    def is_empty(self) -> bool:
        """Whether no frame waits for the store."""
        return not self._waiting

    @property
    def is_gone(self) -> bool:
        """Whether somebody deleted the file or cut it off."""
        found = os.fstat(self._fd)
        return not found.st_nlink or found.st_size < self.end

    def frames(self) -> Iterator[tuple[int, bytes | None]]:
        """Yield the description and all frames that are not in the store, each with the place where it ends.

        `None` is what cannot be read: a frame with a wrong CRC, or all from a length on that leads beyond the end.
        """
        size, at = os.fstat(self._fd).st_size, _MARK.size
        done = _MARK.unpack(os.pread(self._fd, at, 0).ljust(at, b"\0"))[0]
        done = done if done <= size else 0
        while at < size:
            length, _ = _FRAME.unpack(os.pread(self._fd, _FRAME.size, at).ljust(_FRAME.size, b"\0"))
            end = at + _FRAME.size + length if length else size + 1
            if at == _MARK.size or end > done:
                yield end, self.read(at) if end <= size else None
            at = end

    def finished_to(self, place: int) -> None:
        """Note that the store has all frames that end there or before."""
        os.pwrite(self._fd, _MARK.pack(place), 0)

    def remove(self) -> None:
        """Delete the file. Its lock is free only then, so nobody else takes it over."""
        try:
            self.path.unlink(missing_ok=True)
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Close the file and leave it: to whoever takes it over, or in a forked child to the parent."""
        fd, self._fd = self._fd, -1  # the number may soon be that of a file of the app's
        try:
            if fd >= 0:  # gevent's `close` raises another error
                self._close(fd)
        except OSError:  # without `suppress`, which may be taken apart as well
            pass


def spool_directory(settings: Settings) -> Path:
    """Return the directory of a store's spool: beside a file, else in the project's directory. It may not exist."""
    if is_postgres(settings.store_url):
        return settings.directory / "spool"
    # SQLite keeps its own files beside the file that a link leads to.
    return Path(f"{os.path.realpath(sqlite_path(settings.store_url))}-spool")


def _prefix(settings: Settings) -> str:
    # A file goes to the store and project that it was meant for: several may share a directory. Beside a SQLite file it
    # is that store. On a server the login does not count, because passwords change.
    store = ""
    if is_postgres(settings.store_url):
        try:
            its = postgres_parameters(settings.store_url)
        except ConfigError:  # whoever opens the store says so
            its = {"host": settings.store_url}
        store = "\0".join(its.get(name, "") for name in ("host", "port", "dbname"))
    return blake2b(f"{store}\0{settings.project}".encode(errors="surrogatepass"), digest_size=6).hexdigest() + "."


def _directory(settings: Settings) -> tuple[Path, set[int]]:
    """Return the directory of the spool and the users whose files in it are read; raises if it is another user's."""
    directory = spool_directory(settings)
    # Who owns the directory around it could replace the store as well. Some file systems know one owner only.
    owner, trusted = directory.stat().st_uid, {0, os.geteuid(), directory.parent.stat().st_uid}
    if owner not in trusted:
        raise PermissionError(errno.EPERM, "it belongs to another user", str(directory))
    return directory, {os.geteuid(), owner}


def _locked(path: Path, owners: set[int], flags: int = 0) -> SpoolFile | None:
    """Open a file of the spool and take its lock; `None` if that is another's, or the file is not one of the spool."""
    with in_database():  # forks wait, else a child would hold the lock for as long as it lives
        # Without O_NONBLOCK a device or pipe that somebody put there might hang.
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | flags, 0o600)
        file, mine = SpoolFile(path, fd), False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(fd)
        mine = found.st_nlink > 0 and stat.S_ISREG(found.st_mode) and found.st_uid in owners
    except BlockingIOError:
        pass
    finally:
        if not mine:
            file.let_go()
    return file if mine else None


def create(settings: Settings, description: bytes) -> SpoolFile:
    """Make a file of the spool that this process owns; raises an `OSError` if that cannot be."""
    made = spool_directory(settings)
    made.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    made.mkdir(exist_ok=True, mode=0o700)
    directory, owners = _directory(settings)
    for _ in range(10):  # another process may take a new file for one that was left
        path = directory / f"{_prefix(settings)}{os.urandom(8).hex()}"
        try:
            if (file := _locked(path, owners, os.O_CREAT | os.O_EXCL)) is not None:
                file.begin(description)
                return file
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    raise BlockingIOError(errno.EAGAIN, "no new file can be locked", str(directory))


def left_behind(settings: Settings) -> Iterator[SpoolFile]:
    """Yield the files of processes that have ended. The caller owns each, and must remove it or let it go."""
    try:
        directory, owners = _directory(settings)
        names = sorted(name for name in os.listdir(directory) if name.startswith(_prefix(settings)))
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        file = None
        with suppress(OSError):  # it was taken over meanwhile, or is no file, or cannot be opened by this user
            file = _locked(directory / name, owners)
        if file is not None:
            yield file


def _after_fork() -> None:
    for file in list(_open):
        file.let_go()


# All files that are open here. A forked child leaves them to its parent, else it would hold their locks.
_open: weakref.WeakSet[SpoolFile] = weakref.WeakSet()
os.register_at_fork(after_in_child=_after_fork)
