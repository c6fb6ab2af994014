"""Writes to the store what ended processes left in the spool.

The recorder's thread does it when it has opened the store, and once a minute; so does each command that opens the store
of a project. A file that cannot be written stays for the next one.
"""

import time
from collections.abc import Callable
from itertools import islice

from art_patch._lib.faults import faults
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

    Args:
        open_sink: opens the store; called only if there is something to write.
        breathe: called after each call that was read and each batch that was written.

    Raises:
        StoreError: if the store cannot be written. What it did not take stays in the spool.
    """
    calls = 0
    for file in left_behind(settings):
        try:
            calls += _taken(file, open_sink, breathe)
        except BaseException:
            file.let_go()
            raise
        file.remove()
    return calls


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


def _taken(file: SpoolFile, open_sink: Callable[[], Sink], breathe: Callable[[], None]) -> int:
    frames = file.frames()
    _, description = next(frames, (0, b""))
    converter = Converter(sample_rate=parse_object(description).get("sample_rate", 1.0))
    calls = 0
    while batch := list(islice(frames, BATCH_RECORDS)):
        records = list[Record]()
        for _, body in batch:
            records += _records(converter, body)
            breathe()
        calls += _write(open_sink(), records)
        breathe()
        file.finished([place for place, _ in batch])
    return calls


def _records(converter: Converter, body: bytes) -> list[Record]:
    try:
        content = decode(body, _NoQueue())
        items = content if isinstance(content, list) else [content]
        return [record for item in items for record in converter.convert(item)]
    except Exception as error:
        faults.trouble("recording.frame", error)
        return []


def _write(sink: Sink, records: list[Record]) -> int:
    """Write the records, without those that the store refuses while it takes others; return the number of calls."""
    try:
        sink.write(records)
        return sum(isinstance(record, Call) for record in records)
    except StoreError as error:
        if error.may_pass or len(records) == 1:
            raise
    middle = (len(records) + 1) // 2
    calls, refused = 0, list[StoreError]()
    for half in (records[:middle], records[middle:]):
        try:
            calls += _write(sink, half)
        except StoreError as error:
            if error.may_pass:
                raise
            refused.append(error)
    if len(refused) == 2:
        raise refused[0]
    for error in refused:
        faults.trouble("store.write", error)
    return calls
