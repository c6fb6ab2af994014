"""Writes to the store what ended processes left in the spool.

The recorder's thread does it when it has opened the store, and once a minute; so does each command that opens the store
of a project.
"""

import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from art_patch._lib.faults import faults, logger
from art_patch._lib.loose_json import parse_object
from art_patch.errors import StoreError
from art_patch.recording.converting import Converter
from art_patch.recording.delivery import BATCH_RECORDS, Sink
from art_patch.recording.frames import decode
from art_patch.recording.spool import SpoolFile, left_behind
from art_patch.settings import Settings
from art_patch.types import Call, Record

LOOKS_EVERY_S = 60.0


class _NoQueue:
    """The queue of calls that have ended."""

    generation = 0

    def put(self, item: object, size: int) -> bool:
        raise AssertionError("a call that was read from the spool has ended")


def take_over(settings: Settings, open_sink: Callable[[], Sink], breathe: Callable[[], None] = lambda: None) -> int:
    """Write to the store what ended processes of this project left in the spool; return the number of calls.

    What cannot be read, or is refused by a store that takes others, is dropped, counted and logged. A file that cannot
    be written stays, and does not hold up the others.

    Args:
        open_sink: opens the store; called only if there is something to write.
        breathe: called after each call that was read and each batch that was written.

    Raises:
        StoreError: if the store cannot be written. What it did not take stays in the spool.
        OSError: if the files cannot be read or removed.
    """
    taker = _Taker(open_sink, breathe)
    try:
        while errors := [error for file in left_behind(settings) if (error := taker.take(file)) is not None]:
            if not taker.at_fault or taker.drops:
                raise errors[0]
            taker.drops = taker.at_fault
    finally:
        if taker.lost:
            logger.warning("art_patch: %d parts of the spool cannot be read or stored; they are lost", taker.lost)
    return taker.calls


class Takeover:
    """Takes over once a minute, in the recorder's thread of a process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._looks_at = 0.0

    def look(self, sink: Sink, breathe: Callable[[], None]) -> None:
        """Take over what there is, if it is time for that; never raises."""
        now = time.monotonic()
        if now < self._looks_at:
            return
        self._looks_at = now + LOOKS_EVERY_S
        try:
            take_over(self._settings, lambda: sink, breathe)
        except Exception as error:
            faults.trouble("recording.takeover", error)


class _Taker:
    def __init__(self, open_sink: Callable[[], Sink], breathe: Callable[[], None]) -> None:
        self._open_sink = open_sink
        self._breathe = breathe
        self.calls = 0
        self.lost = 0  # parts of files
        # Files of which the store took nothing; those after which it took others; and those that now lose what it
        # refuses. A store that fails for good looks alike at first, and then nothing may be dropped.
        self._refused: set[Path] = set()
        self.at_fault: set[Path] = set()
        self.drops: set[Path] = set()

    def take(self, file: SpoolFile) -> Exception | None:
        """Write a file to the store and remove it; return why that cannot be. Raises if the store is out of reach."""
        try:
            self._take(file)
            file.remove()
        except Exception as error:
            if getattr(error, "may_pass", False):
                raise
            return error
        finally:
            file.let_go()
        return None

    def _take(self, file: SpoolFile) -> None:
        frames = file.frames()
        _, description = next(frames, (0, b""))
        if description is None:  # then it is not known which share of the calls may be stored
            return self._lose("recording.frame", ValueError("a file without its first frame"))
        converter = Converter(sample_rate=parse_object(description).get("sample_rate", 1.0))
        while batch := list(islice(frames, BATCH_RECORDS)):
            records = list[Record]()
            for _, body in batch:
                records += self._records(converter, body)
                self._breathe()
            refused = _refused(self._open_sink(), records) if records else []
            if len(refused) < len(records):
                self.at_fault |= self._refused
            elif file.path not in self.drops and (mine := [e for _, e in refused if isinstance(e, StoreError)]):
                self._refused.add(file.path)
                raise mine[0]
            for _, error in refused:
                self._lose("store.write", error)
            self.calls += sum(isinstance(each, Call) for each in records)
            self.calls -= sum(isinstance(each, Call) for each, _ in refused)
            self._breathe()
            file.finished_to(batch[-1][0])

    def _records(self, converter: Converter, body: bytes | None) -> list[Record]:
        try:
            if body is None:
                raise ValueError("a broken frame")
            content = decode(body, _NoQueue())
            items = content if isinstance(content, list) else [content]
            return [record for item in items for record in converter.convert(item)]
        except Exception as error:
            self._lose("recording.frame", error)
            return []

    def _lose(self, place: str, error: Exception) -> None:
        self.lost += 1
        faults.trouble(place, error)


def _refused(sink: Sink, records: list[Record]) -> list[tuple[Record, Exception]]:
    """Write the records; return those that the store refuses, which may be all. Raises if it is out of reach."""
    try:
        sink.write(records)
        return []
    except Exception as error:
        if isinstance(error, OSError) or getattr(error, "may_pass", False):
            raise
        if len(records) == 1:
            return [(records[0], error)]
    middle = (len(records) + 1) // 2
    return [*_refused(sink, records[:middle]), *_refused(sink, records[middle:])]
