"""The process's recorder, if there is one. Scores, spans and trajectories go through here; without one they vanish."""

from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch.recording.faults import faults
from art_patch.recording.recorder import Recorder

if TYPE_CHECKING:
    from art_patch.records import Record

_recorder: Recorder | None = None


def set_recorder(recorder: Recorder | None) -> None:
    """Make `recorder` the process's own."""
    global _recorder
    _recorder = recorder


def redacts() -> bool:
    """Whether what this process records is redacted."""
    return _recorder is not None and _recorder.settings.redact is not None


def emit(*records: Record) -> None:
    """Queue records; never raises, never waits."""
    recorder = _recorder
    if recorder is None:
        return
    try:
        for record in records:
            recorder.put_record(record)
    except Exception as error:
        faults.fault("recording.emit", error)
