"""Updates and cycles: what the last ones did, how far the one is that runs, what the next one waits for, and its start.

A cycle is started as the command line would: as a process of its own, which goes on if this server ends.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, Field

from art_patch import insights, pipeline, store
from art_patch._lib.loose_json import as_count, as_number, as_object, objects
from art_patch._lib.process import lives
from art_patch.errors import Busy, NotFound
from art_patch.settings import Settings, variable_of
from art_patch.types import JSON
from art_patch.web.gates import Count, Number, gate_facts, readable, scale_of
from art_patch.web.projects import Asked, Project, Query

_FRESH_S = 2.0
_LOG_LINES = 40
_MOST_STEPS = 300  # that a curve shows; of more, every n-th
CURVES = (
    ("loss", "Loss", ""),
    ("kl_nats", "KL", "to what the recorded answers were sampled from, nats a token"),
    ("entropy_nats", "Entropy", "nats a token"),
    ("clip_fraction", "Clip fraction", "share of the tokens"),
    ("grad_norm", "Gradient norm", ""),
    ("tokens_per_s", "Tokens per second", ""),
)
"""Name in the history of an update, title of its curve, and a note."""

_GATES = ("gate", "upstream_gate")
_CYCLE = "cycle"  # name of the lease that a cycle holds

# By the project's directory: the newest process, and when it was started.
_started: dict[Path, tuple[subprocess.Popen[bytes], float]] = {}
_lock = threading.Lock()


class CyclesQuery(Query):
    """Which cycles are listed."""

    before: str = Field("", description="Id of a cycle: those before it are listed.")
    limit: int = Field(25, ge=1, le=200, description="Number of cycles.")


def facts(asked: Asked) -> JSON:
    """Return the list's facts."""
    directory, query = asked.settings.directory, asked.query
    ids = [key for key in insights.cycle_ids(directory) if not query.before or key < query.before]
    read = {key: insights.cycle_report(directory, key) for key in ids[: query.limit]}
    found = [report for report in read.values() if report is not None]
    return {
        "running": running(asked),
        "waits": asked.project.kept("waits", _FRESH_S, lambda: insights.waits_for(asked.settings, asked.store)),
        "log": insights.job_log(directory),
        "log_lines": insights.job_log_tail(directory, limit=_LOG_LINES),
        "last_retrain": pipeline.last_retrain(directory),
        "cycles": [{key: value for key, value in each.items() if key != "metrics"} for each in found],
        "unread": [key for key, report in read.items() if report is None],
        "by_cycle": _by_cycle(found[::-1]),
        "directory": str(directory),
        "older": ids[query.limit - 1] if len(ids) > query.limit else None,
    }


def running(asked: Asked) -> JSON | None:
    """Return the cycle that runs, with its stages so far; one that a page has just started may have none yet."""
    now, found = asked.now, pipeline.read_running(asked.settings.directory)
    if found is None:
        return {"who": None, "since": None, "stages": []} if is_starting(asked.project) else None
    stages: list[JSON] = []
    for name, given in as_object(found.get("stages")).items():
        its, _ = readable(_Stage, given)
        ended_at = its.at if its.done >= its.total else max(now, its.since)
        stages.append({"name": name, "done": its.done, "total": its.total, "took_s": ended_at - its.since})
    return {"who": str(found.get("who")), "since": as_number(found.get("began_at")), "stages": stages}


class _Stage(BaseModel):
    since: Number = 0.0
    at: Number = 0.0
    done: Count = 0
    total: Count = 0


def _by_cycle(found: Sequence[JSON]) -> JSON:
    """Return what each cycle learned from and what its gate saw, oldest first, for a chart."""
    series: dict[str, list[float | None]] = {"reward of the groups": [], "candidate": [], "champion": []}
    for each in found:
        train, gate = (as_object(each["metrics"].get(name)) for name in ("train", "gate"))
        series["reward of the groups"].append(as_number(train.get("mean_reward")))
        for name in ("candidate", "champion"):
            series[name].append(as_number(gate.get(name)))
    told = {name: its for name, its in series.items() if any(value is not None for value in its)}
    return {"x": [each["began_at"] for each in found], "series": told}


def one(asked: Asked) -> JSON:
    """Return the facts of one cycle."""
    key, directory = asked.ids["id"], asked.settings.directory
    # Only an id that is there: it becomes a part of a path.
    report = insights.cycle_report(directory, key) if key in insights.cycle_ids(directory) else None
    if report is None:
        raise NotFound(f"there is no cycle {key!r}; `art-patch cycles` lists them")
    metrics: dict[str, Any] = report["metrics"]
    candidate = asked.store.ledger.policy(report["candidate"]) if report.get("candidate") else None
    train = as_object(metrics.get("train"))
    gates = {name: found for name in _GATES if (found := gate_facts(metrics.get(name))) is not None}
    return report | {
        "timeline": _timeline(report["stages_s"]),
        "lines": {stage: _lines(values) for stage, values in metrics.items()},
        "curves": _curves(train.get("history")),
        "round_trips": _round_trips(as_object(candidate.metrics.get("train"))) if candidate is not None else None,
        "candidate_state": candidate.state if candidate is not None else None,
        "gates": gates,
        "scale": scale_of(gates.values()),
        "report": str(directory / "cycles" / f"{key}.md"),
    }


def start(asked: Asked) -> JSON:
    """Return what would happen if a cycle were started now."""
    command, log = command_of(asked.settings), asked.settings.directory / insights.JOB_LOG
    return {
        "refused": why_not(asked.project),
        "waits": insights.waits_for(asked.settings, asked.store),
        "command": " ".join(command[command.index("art_patch") + 1 :]),
        "log": str(log),
    }


def start_process(project: Project, who: str) -> subprocess.Popen[bytes]:
    """Start `art-patch retrain` in the name of `who`; its output goes to the log of the scheduled job.

    Raises `Busy` if a cycle runs, as far as one can tell here; the command itself makes sure of it.
    """
    settings = project.settings
    with _lock:
        if (why := why_not(project)) is not None:
            raise Busy(why)
        known = {"project": settings.project, "home": str(settings.directory.parent.absolute())}
        if settings.store is not None:
            known["store"] = store.absolute_url(settings.store)
        variables = {variable_of(field): value for field, value in known.items()}
        with open(settings.directory / insights.JOB_LOG, "ab", opener=_private) as log:
            process = subprocess.Popen(
                [*command_of(settings), f"--who={who}"],
                env={**os.environ, **variables}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        _started[settings.directory] = process, time.time()
    # So that the process leaves no zombie behind.
    threading.Thread(target=process.wait, name="art_patch-web-cycle", daemon=True).start()
    return process


def command_of(settings: Settings) -> list[str]:
    """Return the command that runs a cycle of this project."""
    return [sys.executable, "-P", "-m", "art_patch", "retrain", "--project", settings.project]


def why_not(project: Project) -> str | None:
    """Return why no cycle can be started now; `None` if one can."""
    if is_starting(project) or pipeline.read_running(project.settings.directory) is not None:
        return "a cycle is running; start another one when it is done"
    owner = project.store.leases.read(_CYCLE).owner
    if owner is not None and lives(owner):
        return f"a cycle is running on this store ({owner}); start another one when it is done"
    return None


def is_starting(project: Project) -> bool:
    """Whether a process that this server has started still runs, and has not noted its end yet."""
    process, since = _started.get(project.settings.directory, (None, 0.0))
    if process is None or process.poll() is not None:
        return False
    last = pipeline.last_retrain(project.settings.directory)
    return last is None or last["ended_at"] < since


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _timeline(stages_s: JSON) -> list[JSON]:
    """Return the stages one after the other: where each begins and how long it is, as shares of all."""
    whole, begin, found = sum(stages_s.values()), 0.0, list[JSON]()
    for name, seconds in stages_s.items():
        share = seconds / whole if whole else 0.0
        found.append({"name": name, "seconds": seconds, "begin": begin, "share": share})
        begin += share
    return found


def _lines(values: Any) -> list[str]:
    """Return the metrics of a stage as `art-patch cycles show` prints them, a line for each."""
    if not isinstance(values, dict):
        return [str(values)]
    its = cast("dict[str, Any]", values)
    shown = (pipeline.metrics_line({key: value}) for key, value in its.items() if key not in pipeline.LONG)
    return [line for line in shown if line]


def _curves(history: Any) -> JSON:
    """Return the numbers of an update's steps; `steps` has the numbers of the steps that are shown."""
    steps = objects(history)
    every = math.ceil(len(steps) / _MOST_STEPS) if steps else 1
    shown = [*enumerate(steps, 1)][::every]
    values = {name: [as_number(step.get(name)) for _, step in shown] for name, _, _ in CURVES}
    told = [
        {"name": name, "title": title, "note": note, "values": values[name]}
        for name, title, note in CURVES
        if any(value is not None for value in values[name])
    ]
    return {"steps": [number for number, _ in shown], "of": len(steps), "curves": told}


def _round_trips(train: JSON) -> JSON | None:
    found = as_object(train.get("round_trips"))
    counts = {name: as_count(found.get(name)) for name in ("exact", "calls")}
    differences = {what: count for what, its in as_object(found.get("differences")).items() if (count := as_count(its))}
    return counts | {"differences": differences} if found else None
