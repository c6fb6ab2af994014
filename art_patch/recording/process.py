"""The current recorder of this process, and the handling of all recorders at a fork and at the exit.

`context` and integrations queue scores, spans and trajectories through `emit()`. Without `patch()` there is no
current recorder, and these records are discarded.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from art_patch._lib.faults import faults
from art_patch.recording.exchange import Exchange, Queue

if TYPE_CHECKING:
    from opentelemetry.context.context import Context

    from art_patch.settings import Settings
    from art_patch.types import Record, TrajectoryInfo

# How long the exit of the interpreter waits for a store that makes no progress. The goal is two seconds in all.
EXIT_DEADLINE_S = 1.5

# How long the exit waits for a store that is slow but makes progress: it imports a module, creates or migrates a table,
# or takes a batch. A container is killed after 10 s; creating a new store takes 3 s with a tenth of a CPU.
EXIT_AT_MOST_S = 8.0

# billiard is Celery's copy of multiprocessing.
_POOLS = ("multiprocessing", "billiard")

Wants = Callable[[Mapping[str, Any]], bool]


class ProcessRecorder(Queue, Protocol):
    """The methods of `Recorder` that this module uses. `Recorder` itself cannot be imported here: it imports this."""

    settings: Settings

    def put_record(self, record: Record) -> bool:
        """Queue a record; return false if it is dropped."""
        ...

    def end(self, deadline: float, latest: float) -> float:
        """Write the queued records before the process ends; return the deadline for the next recorder."""
        ...

    def restart_in_child(self) -> None:
        """Start again with an empty queue, in a forked child."""
        ...


_recorder: ProcessRecorder | None = None
_wants: Wants | None = None
_alive: weakref.WeakSet[ProcessRecorder] = weakref.WeakSet()


def set_recorder(recorder: ProcessRecorder | None, wants: Wants | None = None) -> None:
    """Make `recorder` the one that `emit()` and `begin_exchange()` use; `None`: nothing is recorded.

    `wants` is given the body of a request, and returns whether its call is recorded. Without it, every call is.
    """
    global _recorder, _wants
    _recorder, _wants = recorder, wants


def begin_exchange(
    body: Mapping[str, Any],
    trajectory: TrajectoryInfo | None,
    span_id: str | None,
    group_key: str | None,
    otel_context: Context | None,
) -> Exchange | None:
    """Return a new exchange for a call that starts now; `None` if the call is not to be recorded."""
    recorder, wants = _recorder, _wants
    if recorder is None or not (wants is None or wants(body)):
        return None
    exchange = Exchange(recorder, str(body.get("model") or ""), trajectory, span_id, group_key)
    if recorder.settings.otel == "auto":
        exchange.otel_context = otel_context
    return exchange


def current_settings() -> Settings | None:
    """Return the settings of the current patch; `None` if the SDK is not patched."""
    return None if _recorder is None else _recorder.settings


def redacts() -> bool:
    """Return whether the setting `redact` removes texts from the records of this process."""
    return _recorder is not None and _recorder.settings.redact is not None


def emit(*records: Record) -> None:
    """Queue records for the store. Never raises and never waits."""
    recorder = _recorder
    if recorder is None:
        return
    try:
        for record in records:
            recorder.put_record(record)
    except Exception as error:
        faults.fault("recording.emit", error)


# Fork and exit.


def register(recorder: ProcessRecorder) -> None:
    """Register a recorder, so that a forked child empties its queue and the end of the process writes it."""
    _alive.add(recorder)
    _write_when_pools_end(recorder)


def write_before_the_app_ends() -> None:
    """Register the exit handler again, after the handlers that the app has registered so far: it runs before them.

    Exit handlers run in the reverse order of their registration. The app's tracer provider shuts down in such a
    handler, and a span that the recorder makes after that is lost.
    """
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


def _after_fork() -> None:
    faults.clear()
    for recorder in list(_alive):
        recorder.restart_in_child()
        _write_when_pools_end(recorder)


def _write_when_pools_end(recorder: ProcessRecorder) -> None:
    """See that the child of a process pool writes its queue: it ends by `os._exit`, which skips `atexit`."""
    for name in _POOLS:
        pool: Any = sys.modules.get(f"{name}.util")
        process: Any = sys.modules.get(f"{name}.process")
        if pool is None or not hasattr(pool, "register_after_fork"):
            continue
        # A child forgets the finalisers of its parent and runs these callbacks right after, so they register anew.
        pool.register_after_fork(recorder, partial(_finalise_with, pool))
        if getattr(process, "_parent_process", None) is not None:
            _finalise_with(pool, recorder)

    celery: Any = sys.modules.get("celery.signals")
    if celery is not None:
        # Celery's children end by `os._exit` without running finalisers; this signal is all that they send.
        celery.worker_process_shutdown.connect(_at_exit, weak=False, dispatch_uid="art_patch")


def _finalise_with(pool: Any, _: ProcessRecorder) -> None:
    pool.Finalize(None, _at_exit, exitpriority=0)


def _at_exit(**_: object) -> None:  # Celery passes arguments
    now = time.monotonic()
    deadline, latest = now + EXIT_DEADLINE_S, now + EXIT_AT_MOST_S
    # All recorders share one deadline: a process with two stores that hang still ends in time.
    for recorder in list(_alive):
        deadline = recorder.end(deadline, latest)


def _at_the_very_end() -> None:
    # Registered at import, so it runs last: for calls that the app's own exit handlers made since `_at_exit`.
    _at_exit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_the_very_end)
