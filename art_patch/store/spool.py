"""Keeps records on this machine's disk until the store has them. A recorder's file of such records is its spool.

Opening a store takes a process more than a tenth of a second, and a store may be slow or down. The recorder writes each
record to its spool first, with plain system calls, so that a process that is killed loses nothing that it had spooled.
A spool is owned by the process that holds its lock (`flock`), which the kernel releases when the process ends, however
it ends; process ids are never compared. Whoever opens the store next calls `take_over`, which writes what is left and
deletes the file. Writing a record again does no harm, so a taker may be killed, too.

The format of a file: a header with the offset up to which the store has everything, then one line for each record: the
CRC-32 of the JSON text that follows. This module imports no SQLAlchemy, because the recorder's thread needs it before
the app's first call has ended.
"""

import fcntl
import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, cast
from zlib import crc32

from art_patch._lib.ids import new_id
from art_patch.errors import StoreError
from art_patch.types import AppReport, Call, Choice, Correction, Record, Score, SpanInfo, TrajectoryInfo

SUFFIX = ".spool"

_MAGIC = b"art_patch.spool/1 "
_HEADER = _MAGIC + b"%020d\n"
_FIRST = len(_HEADER % 0)  # offset of the first record
_TAKEN_AT_ONCE = 32
_KINDS = {each.__name__: each for each in (Call, Correction, Score, SpanInfo, TrajectoryInfo)}


@dataclass(frozen=True, slots=True)
class Span:
    """The place of a record in a spool: offsets of its first byte and of the byte after its last."""

    start: int
    end: int


class Spool:
    """The spool of one recorder. Only the recorder's thread uses it. No method raises if the disk fails."""

    def __init__(self, directory: Path, most_bytes: int) -> None:
        """Make no file yet; the first `append` does, in `directory`. The file may reach `most_bytes`."""
        self._directory = directory
        self._most_bytes = most_bytes
        self._file: int | None = None
        self._path: Path | None = None
        self._end = _FIRST
        self._done = _FIRST
        self.trouble: str | None = None
        """Why the last `append` kept nothing; `None` if it kept its records."""

    def append(self, records: Sequence[Record]) -> list[Span | None]:
        """Write records to the end of the file, and return the place of each; `None` for one that is not kept.

        When this returns, the records survive the end of the process, but not a power cut. An `AppReport` is not kept:
        it describes a process that lives.
        """
        lines = [None if isinstance(record, AppReport) else _line(record) for record in records]
        whole = b"".join(filter(None, lines))
        if not whole or not self._write(whole):
            return [None] * len(lines)
        spans: list[Span | None] = []
        for line in lines:
            size = len(line or b"")
            spans.append(Span(self._end, self._end + size) if line else None)
            self._end += size
        return spans

    def read(self, spans: Iterable[Span]) -> list[Record]:
        """Return the records at these places; `OSError` if the file is unreadable, `ValueError` if one is damaged."""
        assert self._file is not None
        return [_parsed(os.pread(self._file, span.end - span.start, span.start)) for span in spans]

    def done(self, upto: int | None = None) -> None:
        """Tell takers that the store has all before `upto`. Without it, the store has all, and the file shrinks."""
        if self._file is None or self._done == (self._end if upto is None else upto):
            return
        with suppress(OSError):
            if upto is None:
                # Nothing may stay here once the store has it: what is erased there must not come back from a spool.
                os.ftruncate(self._file, _FIRST)
                self._end = upto = _FIRST
            os.pwrite(self._file, _HEADER % upto, 0)
            self._done = upto

    def close(self) -> None:
        """Release the file, and delete it if the store has everything in it."""
        if self._file is None:
            return
        if self._done == self._end:
            with suppress(OSError):
                os.unlink(self._path or "")
        self.let_go()

    def let_go(self) -> None:
        """Close the file. In a forked child this leaves the parent's lock as it is."""
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file, self._end, self._done = None, _FIRST, _FIRST

    def _write(self, whole: bytes) -> bool:
        if self._end + len(whole) > self._most_bytes:
            self.trouble = "the spool is full"
            return False
        try:
            if self._file is None or os.fstat(self._file).st_nlink == 0:  # someone deleted it
                self.let_go()
                self._path, self._file = _new_file(self._directory)
            position, rest = self._end, memoryview(whole)
            while rest:  # a signal or a nearly full disk may cut a write short
                written = os.pwrite(self._file, rest, position)
                position, rest = position + written, rest[written:]
        except OSError as error:
            self.trouble = f"{self._directory} cannot be written ({error.strerror})"
            if self._file is not None:
                with suppress(OSError):
                    os.ftruncate(self._file, self._end)  # no half a record
            return False
        self.trouble = None
        return True


def take_over(directory: Path, write: Callable[[Sequence[Record]], object]) -> int:
    """Write what processes that have ended left in their spools, delete these files, and return how many records.

    Spools of living processes, and those that another process is taking over, stay.

    Args:
        directory: where the spools of the store are; it need not exist.
        write: writes a batch to the store, all of it or nothing, and raises `StoreError`.

    Raises:
        StoreError: if the store cannot be written; the file in question stays as it is.
    """
    taken = 0
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        with _ended(path) as file:
            if file is None:
                continue
            left = _left(file)
            while batch := list(islice(left, _TAKEN_AT_ONCE)):
                taken += _write_all(batch, write)
            path.unlink(missing_ok=True)
    return taken


def waiting_bytes(directory: Path) -> int:
    """Return how many bytes of records wait in the spools of a directory."""
    total = 0
    for path in directory.glob(f"*{SUFFIX}"):
        with suppress(OSError):  # its process has ended meanwhile
            total += max(0, path.stat().st_size - _FIRST)
    return total


def only_project_in(spools: Path) -> str | None:
    """Return the only project of which records wait in its directory of spools; `None` if there is none or several."""
    left = [each.name for each in spools.glob("*") if waiting_bytes(each)]
    return left[0] if len(left) == 1 else None


def _write_all(batch: list[Record], write: Callable[[Sequence[Record]], object]) -> int:
    """Write a batch; leave out records that the store refuses while it takes others."""
    try:
        write(batch)
        return len(batch)
    except StoreError as error:
        written, refused = 0, error
    for record in batch:
        try:
            write([record])
            written += 1
        except StoreError as error:
            refused = error
    if not written:
        raise refused
    return written


def _new_file(directory: Path) -> tuple[Path, int]:
    os.makedirs(directory.parent, mode=0o700, exist_ok=True)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    name = f"{os.getpid()}-{new_id()}"  # the process id is for people
    # Under its final name only when it is locked: until then another process would take it for one that was left.
    draft, path = directory / f".{name}.new", directory / f"{name}{SUFFIX}"
    file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(file, _HEADER % _FIRST, 0)
        os.rename(draft, path)
    except BaseException:
        os.close(file)
        with suppress(OSError):
            os.unlink(draft)
        raise
    return path, file


@contextmanager
def _ended(path: Path) -> Generator[int | None]:
    """Yield an open spool whose process has ended, locked until the block ends; `None` if there is none at `path`."""
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # another process was faster, or it belongs to another user
        yield None
        return
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield None
            return
        yield file if os.fstat(file).st_nlink else None
    finally:
        os.close(file)


def _left(file: int) -> Iterator[Record]:
    """Yield the records that the store does not have yet, up to the first that is not whole."""
    with os.fdopen(os.dup(file), "rb") as lines:
        lines.seek(0)
        header = lines.readline(_FIRST)
        if not header.startswith(_MAGIC) or not header[len(_MAGIC) : -1].isdigit():
            return
        lines.seek(int(header[len(_MAGIC) :]))
        for line in lines:
            try:
                yield _parsed(line)
            except ValueError:
                return


def _line(record: Record) -> bytes | None:
    """Return the line of a record; `None` if it cannot be written as JSON."""
    try:
        text = json.dumps([type(record).__name__, record], default=_plain, ensure_ascii=False, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError):
        return None
    body = text.encode("utf-8", "surrogatepass")
    return b"%08x %b\n" % (crc32(body), body)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {name: getattr(value, name) for name in _names(type(value))}
    if isinstance(value, Mapping):
        return dict(cast(Mapping[Any, Any], value))
    raise TypeError(f"a {type(value).__name__} is no JSON")


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _parsed(line: bytes) -> Record:
    checksum, body = line[:8], line[9:-1]
    if not line.endswith(b"\n") or checksum != b"%08x" % crc32(body):
        raise ValueError("a record in a spool is damaged")
    name, values = json.loads(body.decode("utf-8", "surrogatepass"))
    return _made(_KINDS[name], values)


def _made(kind: Any, values: dict[str, Any]) -> Any:
    # Each list that is a field of a record is a tuple there; the lists inside of messages are no fields.
    known: dict[str, Any] = {name: tuple(cast(Any, v)) if isinstance(v, list) else v for name, v in values.items()}
    if kind is Call:
        known["choices"] = tuple(_made(Choice, choice) for choice in known["choices"])
    return kind(**{name: known[name] for name in _names(kind) if name in known})
