"""What a script logs about its model: metrics of groups, in `history.jsonl`, and values of its own, in `state.json`.

Both files are in the project's directory. The history gets one JSON line for each call of `train` and `log`, so a step
may have several lines. The names of metrics begin with their split: `val/reward`, `train/reward`, `train/loss`.
"""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from art_patch._lib.atomic_files import private, write_whole
from art_patch.rollouts.trajectory_group import TrajectoryGroup

HISTORY, _STATE = "history.jsonl", "state.json"


def metrics_of(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Return the mean of the reward and of each metric over all rollouts, and metrics of the groups.

    `group_NAME` is the mean of the groups' own metric NAME, `reward_std_dev` is the mean of the groups' standard
    deviations, `exception_rate` the share of rollouts that raised.
    """
    runs = [run for group in groups for run in group.trajectories]
    raised = sum(len(group.exceptions) for group in groups)
    values: defaultdict[str, list[float]] = defaultdict(list)
    for run in runs:
        for name, value in {**run.metrics, "reward": run.reward}.items():
            if math.isfinite(value):
                values[name].append(float(value))
    found = {name: statistics.fmean(of_name) for name, of_name in values.items()}
    # Within groups, because an update learns from these differences and not from those between scenarios.
    rewards = [[run.reward for run in group.trajectories if math.isfinite(run.reward)] for group in groups]
    if spreads := [statistics.stdev(of_group) for of_group in rewards if len(of_group) > 1]:
        found["reward_std_dev"] = statistics.fmean(spreads)
    of_groups: defaultdict[str, list[float]] = defaultdict(list)
    for name, value in (item for group in groups for item in group.metrics.items()):
        of_groups[name].append(float(value))
    found |= {f"group_{name}": statistics.fmean(of_name) for name, of_name in of_groups.items()}
    if runs or raised:
        found["exception_rate"] = raised / (len(runs) + raised)
    return found


def note(directory: Path, *, step: int, split: str, metrics: Mapping[str, float], at: float) -> None:
    """Append one line with the metrics of a step to the history file; `at` is in seconds since the epoch."""
    line = {"step": step, "at": at} | {f"{split}/{name}": value for name, value in metrics.items()}
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    # One short write at the end of the file: lines of two scripts do not mix.
    with open(directory / HISTORY, "a", opener=private) as file:
        file.write(json.dumps(line) + "\n")


def history(directory: Path, metric: str) -> list[tuple[int, float]]:
    """Return (step, mean value) of a metric, by step, for each step that has the metric."""
    values: defaultdict[int, list[float]] = defaultdict(list)
    for line in _lines(directory / HISTORY):
        if isinstance(value := line.get(metric), int | float):
            values[line["step"]].append(value)
    return [(step, statistics.fmean(values[step])) for step in sorted(values)]


def best_step(directory: Path, metric: str, steps: Iterable[int]) -> int | None:
    """Return the step, among `steps`, with the highest mean of a metric; `None` if no step has the metric."""
    means = dict(history(directory, metric))
    # Of equal means the latest step, which has learned more.
    return max(means.keys() & set(steps), key=lambda step: (means[step], step), default=None)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            read: Any = json.loads(line)
        except ValueError:  # cut off by a full disk or a kill
            continue
        # The file is the user's to edit; a line of another form is passed over.
        if isinstance(read, dict) and isinstance(read.get("step"), int):
            yield read


def read_state(directory: Path) -> dict[str, Any] | None:
    """Return what the script has kept; `None` if it has kept nothing."""
    path = directory / _STATE
    return json.loads(path.read_text()) if path.exists() else None


def write_state(directory: Path, state: Mapping[str, Any]) -> None:
    """Keep JSON values in place of those that were kept before."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_whole(directory / _STATE, json.dumps(state, indent=2) + "\n")
