"""The spool: files that hold recorded calls from a few milliseconds after their end until the store has them.

A process appends to files of its own, `store.db-spool/<project>.<random>` beside the store, mode 600. It holds the lock
(`flock`) of such a file for as long as it lives, however it ends; whoever gets the lock may take the file over. The
lock belongs to an open file and not to a process number, so containers that share a directory cannot mistake one
another.

A file begins with the place of its first frame that is not in the store yet. Then come frames: length, CRC-32, bytes.
The first frame describes the process; what is in the others, `frames.py` decides. A write that a kill cut short leaves
a frame with a wrong length or CRC at the end; it is not read. A file is emptied whenever the store has all of it.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from art_patch._lib.os_threads import RLock
from art_patch.settings import Settings
from art_patch.store import is_postgres, sqlite_path

_FRAME = struct.Struct("<II")
_MARK = struct.Struct("<Q")

# A process with a backlog begins a new file after so many bytes, so that the space of what was written is given back.
FILE_BYTES = 16 << 20


class SpoolFile:
    """A file of the spool whose lock this process holds. One thread appends, one reads and finishes frames."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._begins = self.end = 0
        self._lock = RLock()
        # Where the frames begin that are not in the store, in order.
        self._waiting: dict[int, None] = {}

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
            if not self._waiting:
                os.ftruncate(self._fd, self._begins)
                self.end = self._begins
            os.pwrite(self._fd, _MARK.pack(next(iter(self._waiting), self.end)), 0)

    @property
    def is_empty(self) -> bool:
        """Whether no frame waits for the store."""
        return not self._waiting

    @property
    def is_gone(self) -> bool:
        """Whether somebody deleted the file."""
        return not os.fstat(self._fd).st_nlink

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """Yield the description and all frames that are not in the store, with the places where they begin."""
        size = os.fstat(self._fd).st_size
        first = self.read(_MARK.size)
        if first is None:
            return
        self._begins = _MARK.size + _FRAME.size + len(first)
        yield _MARK.size, first
        at = max(_MARK.unpack(os.pread(self._fd, _MARK.size, 0))[0], self._begins)
        while at < size and (body := self.read(at)) is not None:
            self._waiting[at] = None
            at += _FRAME.size + len(body)
        self.end = at
        for place in list(self._waiting):
            yield place, self.read(place) or b""

    def remove(self) -> None:
        """Delete the file. Its lock is free only then, so nobody else takes it over."""
        try:
            self.path.unlink(missing_ok=True)
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Close the file and leave it: to whoever takes it over, or in a forked child to the parent."""
        fd, self._fd = self._fd, -1  # the number may soon be that of a file of the app's
        with suppress(OSError):
            os.close(fd)


def spool_directory(settings: Settings) -> Path:
    """Return the directory of a store's spool: beside a file, else in the project's directory. It may not exist."""
    if is_postgres(settings.store_url):
        return settings.directory / "spool"
    return Path(f"{sqlite_path(settings.store_url)}-spool")


def _prefix(settings: Settings) -> str:
    # A file goes to the store and project that it was meant for: several may share a directory.
    return blake2b(f"{settings.store_url}\0{settings.project}".encode(), digest_size=6).hexdigest() + "."


def create(settings: Settings, description: bytes) -> SpoolFile:
    """Make a file of the spool that this process owns; raises an `OSError` if that cannot be."""
    directory = spool_directory(settings)
    directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    directory.mkdir(exist_ok=True, mode=0o700)
    while True:
        path = directory / f"{_prefix(settings)}{os.urandom(8).hex()}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        file = SpoolFile(path, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists():  # else another process has taken the new file for one that was left
                file.begin(description)
                return file
        except BlockingIOError:
            pass
        except BaseException:
            file.remove()
            raise
        file.let_go()


def left_behind(settings: Settings) -> Iterator[SpoolFile]:
    """Yield the files of processes that have ended. The caller owns each, and must remove it or let it go."""
    with suppress(FileNotFoundError, NotADirectoryError):
        directory = spool_directory(settings)
        for name in sorted(name for name in os.listdir(directory) if name.startswith(_prefix(settings))):
            path = directory / name
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:  # it was taken over meanwhile, or belongs to another user
                continue
            file = SpoolFile(path, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mine = os.fstat(fd).st_nlink > 0
            except OSError:  # its process lives
                mine = False
            if mine:
                yield file
            else:
                file.let_go()
