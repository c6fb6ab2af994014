"""What the last cycles did, whether the scheduled job ran, and what the next cycle waits for.

The reports are files in the project's directory, which `pipeline/cycle_run.py` writes. A `retrain` that ended before
its cycle began, because no engine or no judge was there, leaves no report: its words are in the job's log, of which the
last line is told.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from art_patch import errors, pipeline, store
from art_patch._lib.loose_json import as_number, as_object, shallow
from art_patch._lib.words import counted, one_line
from art_patch.errors import ArtPatchError, GateRejected
from art_patch.settings import Settings

JOB_LOG = "retrain.log"
"""In the project's directory: the line in crontab of `art-patch cron install` appends to it."""

_TAIL_BYTES = 8_192
_DEEPEST = 30  # levels of a report that are read
_TEXTS = ("champion", "candidate", "who", "reason")


def cycle_reports(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the reports of a project's cycles, newest first, each with its id, exit code and the judge's cost."""
    for path in _files(directory):
        if (facts := _read(path)) is not None:
            yield facts


def waits_for(settings: Settings, opened: store.Store) -> list[str]:
    """Return what the next cycle would wait for, or that it would train."""
    ledger, config = opened.ledger, pipeline.CycleConfig()
    if (tested := ledger.challenger()) is not None:
        return [f"looks after {tested.name}, which is tested as a {tested.state}; nothing is trained meanwhile"]
    if ledger.leader() is None:
        return [pipeline.why_none_serves(opened)]
    found = [
        f"{each.name} won its gate and waits for `art-patch promote {each.name}`"
        for each in ledger.policies()
        if each.state == "candidate" and each.metrics.get("waits")
    ]
    scored = len(opened.read.group_ids(state="scored", held_out=False))
    formed = len(opened.read.group_ids(state="formed", held_out=False))
    held_out = len(opened.read.group_ids(state="formed", held_out=True))
    least, waiting = settings.gate_scenarios, counted(formed, "group waits", "groups wait")
    if scored < config.min_groups:
        found.append(f"{scored} of {config.min_groups} scored groups that an update needs; {waiting} for the judge")
    if held_out < least:
        found.append(f"{held_out} groups are held out, and the gate needs {least} held-out scenarios")
    more = f"; {waiting} for the judge" if formed else ""
    return found or [f"would train: {scored} scored groups, {held_out} held-out groups{more}"]


def cycle_ids(directory: Path, prefix: str = "") -> list[str]:
    """Return the ids of a project's cycles that begin so, newest first."""
    return [path.stem for path in _files(directory) if path.stem.startswith(prefix)]


def cycle_report(directory: Path, key: str) -> dict[str, Any] | None:
    """Return the report of one cycle; `None` if it is gone or cannot be read. `key` is one of `cycle_ids`.

    `unread` names the parts that are not what a cycle writes, and are left out.
    """
    return _read(directory / "cycles" / f"{key}.json")


def _files(directory: Path) -> list[Path]:
    # The names begin with the time.
    return sorted((directory / "cycles").glob("*-*.json"), key=lambda path: path.name, reverse=True)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        facts: Any = shallow(json.loads(path.read_text("utf-8")), _DEEPEST)
        kept: dict[str, Any] = facts | {"outcome": str(facts["outcome"]), "began_at": float(facts["began_at"])}
        time.localtime(kept["began_at"])
    # A cycle that ended just now deleted it, or somebody edited it.
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    texts = {name: kept[name] for name in _TEXTS if kept.get(name) is not None}
    stages, metrics = (as_object(kept.get(name)) for name in ("stages_s", "metrics"))
    costs = {name: its["cost_usd"] for name, its in metrics.items() if isinstance(its, dict) and "cost_usd" in its}
    known = [cost for each in costs.values() if (cost := as_number(each)) is not None]
    took_s, lengths = as_number(kept.get("took_s") or 0.0), {name: as_number(its) for name, its in stages.items()}
    unread = [name for name, text in texts.items() if not _is_text(text)]
    unread += [name for name in ("stages_s", "metrics") if not isinstance(kept.get(name) or {}, dict)]
    unread += ["took_s"] if took_s is None else []
    unread += [f"stages_s {name}" for name, its in lengths.items() if its is None]
    unread += [f"{name} cost_usd" for name, cost in costs.items() if cost is not None and as_number(cost) is None]
    return {
        "id": path.stem,
        **kept,
        **{name: None if name in unread else texts.get(name) for name in _TEXTS},
        "reason": "" if "reason" in unread else texts.get("reason", ""),
        "took_s": took_s or 0.0,
        "stages_s": {name: its for name, its in lengths.items() if its is not None},
        "metrics": metrics,
        "exit_code": _exit_code(kept),
        "judge_usd": sum(known) if known or not costs else None,
        "judge_usd_is_whole": len(known) == len(costs),
        "unread": unread,
    }


def _is_text(value: Any) -> bool:
    # Neither half characters nor NUL: databases, which are asked about it, refuse them.
    return isinstance(value, str) and value == value.encode("utf-8", "replace").decode().replace("\0", "")


def _exit_code(facts: dict[str, Any]) -> int | None:
    """Return the exit code of the `retrain` that ran this cycle; `None` if the report does not tell it."""
    if facts["outcome"] != "failed":
        return GateRejected.exit_code if facts["outcome"] == "rejected" else 0
    # The reason of a failed cycle begins with the class of its error.
    error: Any = getattr(errors, str(facts.get("reason", "")).partition(":")[0], None)
    return error.exit_code if isinstance(error, type) and issubclass(error, ArtPatchError) else None


def job_log(directory: Path) -> dict[str, Any] | None:
    """Return when the job's log was last written, and its last line; `None` without a log."""
    path = directory / JOB_LOG
    found = _tail(path)
    if found is None:
        return None
    at, lines = found
    return {"path": str(path), "at": at, "last_line": one_line(lines[-1]) if lines else ""}


def job_log_tail(directory: Path, *, limit: int) -> list[str]:
    """Return the last lines of the job's log, at most `limit`; none without a log."""
    _, lines = _tail(directory / JOB_LOG) or (0.0, [])
    return [one_line(line) for line in lines[-limit:]]


def _tail(path: Path) -> tuple[float, list[str]] | None:
    try:
        with path.open("rb") as file:
            at, size = path.stat().st_mtime, path.stat().st_size
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return None
    said = [line for line in lines if line.strip()]
    # The first one begins somewhere in a line; a single one is better than none.
    return at, said[1:] if size > _TAIL_BYTES and len(said) > 1 and lines[0].strip() else said
