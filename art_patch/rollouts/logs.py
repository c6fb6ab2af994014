"""Metrics of each step, one JSON line at a time: `history.jsonl` in the project's directory.

Metrics carry their split: `val/reward`, `train/reward`, `train/loss`. A step may have several lines.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from art_patch.rollouts.trajectory_group import TrajectoryGroup

FILE = "history.jsonl"


def metrics_of(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Return means of rewards and metrics, the mean spread of rewards within groups, and the share that raised."""
    runs = [run for group in groups for run in group]
    raised = sum(len(group.exceptions) for group in groups)
    values: defaultdict[str, list[float]] = defaultdict(list)
    for run in runs:
        for name, value in {**run.metrics, "reward": run.reward}.items():
            if math.isfinite(value):
                values[name].append(float(value))
    found = {name: statistics.fmean(of_name) for name, of_name in values.items()}
    # Within groups, because that is what an update learns from; the spread between scenarios says how they differ.
    spreads = [statistics.stdev(rewards) for group in groups if len(rewards := _rewards(group)) > 1]
    if spreads:
        found["reward_std_dev"] = statistics.fmean(spreads)
    if runs or raised:
        found["exception_rate"] = raised / (len(runs) + raised)
    return found


def note(directory: Path, *, step: int, split: str, metrics: Mapping[str, float], at: float) -> None:
    """Append a line with the metrics of a policy's step; `at` is in seconds since the epoch."""
    line = {"step": step, "at": at} | {f"{split}/{name}": value for name, value in metrics.items()}
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    # One short write at the end of the file: lines of two scripts do not mix.
    with (directory / FILE).open("a") as file:
        file.write(json.dumps(line) + "\n")


def history(directory: Path, metric: str) -> list[tuple[int, float]]:
    """Return a metric's mean at each step that has it, by step."""
    values: defaultdict[int, list[float]] = defaultdict(list)
    for line in _lines(directory / FILE):
        if isinstance(value := line.get(metric), int | float):
            values[line["step"]].append(value)
    return [(step, statistics.fmean(values[step])) for step in sorted(values)]


def best_step(directory: Path, metric: str, steps: Iterable[int]) -> int | None:
    """Return which of the steps has the highest mean of a metric, the latest of equal ones; `None` if none has any."""
    means = dict(history(directory, metric))
    # Of equal means the latest step, which has learned more.
    return max((step for step in steps if step in means), key=lambda step: (means[step], step), default=None)


def _lines(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            read: Any = json.loads(line)
        except ValueError:  # cut off by a full disk or a kill
            continue
        # The file is the user's to edit; a line of another form is passed over.
        if isinstance(read, dict) and isinstance(read.get("step"), int):
            found.append(read)
    return found


def _rewards(group: TrajectoryGroup) -> list[float]:
    return [run.reward for run in group if math.isfinite(run.reward)]
