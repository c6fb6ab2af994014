"""The recorders of this process, one for each patched project, and their handling at a fork and at the exit.

`context` and integrations queue scores, spans and trajectories through `emit()`. Each goes to the projects in which
calls of its trajectory were made: see `_projects_of`. Without `patch()` or `wrap()` these records are discarded.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from art_patch._lib.faults import faults
from art_patch._lib.forking import no_more_imports
from art_patch.errors import ConfigError
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


# The recorder of all clients that `wrap()` gave no project; those of all projects, by name.
_recorder: ProcessRecorder | None = None
_recorders: Mapping[str, ProcessRecorder] = {}
_wants: Wants | None = None
_alive: weakref.WeakSet[ProcessRecorder] = weakref.WeakSet()

# Trajectory, and a step of it or `None` -> project -> when its latest call there began (monotonic clock).
_made_in: dict[tuple[str, str | None], dict[str, float]] = {}
_MOST_KEPT = 10_000


def set_recorder(
    recorder: ProcessRecorder | None, wants: Wants | None = None, others: Iterable[ProcessRecorder] = ()
) -> None:
    """Make `recorder` the one of `begin_exchange()` and of all that belongs to none of the `others`; `None`: none.

    `wants` is given the body of a request, and returns whether its call is recorded. Without it, every call is.
    """
    global _recorder, _recorders, _wants
    _recorder, _wants = recorder, wants
    _recorders = {each.settings.project: each for each in (recorder, *others) if each is not None}


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
    exchange.learn = recorder.settings.learn
    note_call(recorder.settings.project, trajectory, span_id)
    if recorder.settings.otel == "auto":
        exchange.otel_context = otel_context
    return exchange


def note_call(project: str, trajectory: TrajectoryInfo | None, span_id: str | None) -> None:
    """Note that a call is made in `project`, so that `emit()` knows where other records of its trajectory belong."""
    if trajectory is None:
        return
    for step in {None, span_id}:
        _made_in.setdefault((trajectory.id, step), {})[project] = time.monotonic()
    if len(_made_in) > _MOST_KEPT:
        # The oldest tenth at once, because building the list takes as long as the dict is large.
        for oldest in list(_made_in)[: _MOST_KEPT // 10]:
            _made_in.pop(oldest, None)


def settings_of(trajectory_id: str) -> Settings | None:
    """Return the settings of the project in which a trajectory has its latest call; `None` without a patch."""
    recorder = _recorders.get((_projects_of(trajectory_id) or [""])[-1])
    if recorder is None and _recorders:
        raise ConfigError(f"this process has the projects {', '.join(_recorders)}; ask after the run's first call")
    return None if recorder is None else recorder.settings


def redacts(how: Callable[[Iterable[bool]], bool] = any) -> bool:
    """Return whether the setting `redact` removes texts from the records of any project, or with `all` of every one."""
    return bool(_recorders) and how(each.settings.redact is not None for each in _recorders.values())


def knows(trajectory_id: str, project: str | None = None) -> bool:
    """Return whether `emit()` knows the project of a trajectory's records; a `ConfigError` if it has no `project`."""
    if project is not None and _recorders and project not in _recorders:
        raise ConfigError(f"this process has no project {project!r}; it has {', '.join(_recorders)}")
    return project is not None or len(_recorders) < 2 or (trajectory_id, None) in _made_in


def emit(*records: Record, project: str | None = None) -> bool:
    """Queue records for the stores of the projects that they belong to, or of `project`. Never raises, never waits.

    A trajectory and its scores belong to each project in which it has calls, a correction to that of the latest call.
    Returns false if the last record belongs to no project of this process.
    """
    found: list[ProcessRecorder] = []
    try:
        for record in records:
            kind = type(record).__name__  # by name, because `patch()` must not make the classes
            names = [project] if project else _projects_of(getattr(record, "trajectory_id", None) or record.id)
            if kind == "SpanInfo" and len(names) > 1:
                names = _projects_of_step(record)
            found = [_recorders[name] for name in names[-1 if kind == "Correction" else 0 :] if name in _recorders]
            for recorder in found:
                recorder.put_record(record)
    except Exception as error:
        faults.fault("recording.emit", error)
    return bool(found)


def _projects_of(run: str) -> list[str]:
    """Return the projects in which a trajectory has calls, that of the latest call last; else that of `patch()`."""
    made = dict(_made_in.get((run, None), {})) if len(_recorders) > 1 else {}
    if made:
        return sorted(made, key=made.__getitem__)
    return [] if _recorder is None else [_recorder.settings.project]


def _projects_of_step(step: Any) -> list[str]:
    """Return the projects of the calls inside a step that has ended, else those of the step around it."""
    # Not all those of its trajectory: a step may hold texts of one of them.
    around = {} if step.parent_id is None else _made_in.setdefault((step.trajectory_id, step.parent_id), {})
    inside = _made_in.get((step.trajectory_id, step.id), {})
    around.update(inside)
    return list(inside or around)


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
    no_more_imports(EXIT_AT_MOST_S)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_the_very_end)
