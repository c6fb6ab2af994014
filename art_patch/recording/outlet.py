"""The process's recorder, if there is one. Scores, spans and trajectories go through here; without one they vanish.

So do calls that an integration tells of, as far as the app's settings want them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from art_patch._lib.faults import faults
from art_patch.recording.exchange import Exchange
from art_patch.recording.recorder import Recorder

if TYPE_CHECKING:
    from opentelemetry.context.context import Context

    from art_patch.settings import Settings
    from art_patch.types import Record, TrajectoryInfo

Wants = Callable[[Mapping[str, Any]], bool]

_recorder: Recorder | None = None
_wants: Wants | None = None


def set_recorder(recorder: Recorder | None, wants: Wants | None = None) -> None:
    """Make `recorder` the process's own; `wants` tells by its body whether a call is ours, all of them unless given."""
    global _recorder, _wants
    _recorder, _wants = recorder, wants


def begin_exchange(
    body: Mapping[str, Any],
    trajectory: TrajectoryInfo | None,
    span_id: str | None,
    group_key: str | None,
    otel_context: Context | None,
) -> Exchange | None:
    """Return the exchange of a call that starts; `None` if it is none of ours, or nobody records."""
    recorder, wants = _recorder, _wants
    if recorder is None or not (wants is None or wants(body)):
        return None
    exchange = Exchange(recorder, str(body.get("model") or ""), trajectory, span_id, group_key)
    if recorder.settings.otel == "auto":
        exchange.otel_context = otel_context
    return exchange


def current_settings() -> Settings | None:
    """Return the settings of the patch that is in force, `None` without one."""
    return None if _recorder is None else _recorder.settings


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
