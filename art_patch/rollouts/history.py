"""What a script logs about its model: metrics of groups, in `history.jsonl`, and values of its own, in `state.json`.

Both files are in the project's directory. Models that are not trained have values of their own, in `state-NAME.json`,
and their lines of the history hold their name as `model`. The history gets one JSON line for each call of `train` and
`log`, so a step may have several lines. The names of metrics begin with their split: `val/reward`, `train/loss`.
"""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from numbers import Integral
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from art_patch._lib.atomic_files import private, write_whole
from art_patch.errors import ConfigError
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
        if math.isfinite(value):
            of_groups[name].append(float(value))
    found |= {f"group_{name}": statistics.fmean(of_name) for name, of_name in of_groups.items()}
    if runs or raised:
        found["exception_rate"] = raised / (len(runs) + raised)
    return found


def number(name: str, value: Any) -> float:
    """Return a number that a script gave, numpy's and torch's too; raises a `ConfigError` for anything else."""
    if not isinstance(value, str | bytes):
        with suppress(TypeError, ValueError, RuntimeError):
            return float(value)
    raise ConfigError(f"{name} is {value!r}, and must be a number")


def check_log(split: Any, step: Any, metrics: Any) -> dict[str, float]:
    """Return the metrics that a script logs, as numbers; raises a `ConfigError` if an argument is something else."""
    if not isinstance(split, str) or not split:
        raise ConfigError(f"split={split!r} must be a name, such as train, val or test")
    if step is not None and (isinstance(step, bool) or not isinstance(step, Integral) or step < 0):
        raise ConfigError(f"step={step!r} must be a whole number, at least 0")
    if not isinstance(metrics, Mapping | None):
        raise ConfigError(f"metrics={metrics!r} must be a dictionary of numbers")
    given = cast("Mapping[str, Any]", metrics or {})
    return {name: number(f"the metric {name}", value) for name, value in given.items()}


def check_numbers(groups: Iterable[TrajectoryGroup]) -> None:
    """Raise a `ConfigError` if a reward or a metric is no number, before anything of the groups is stored."""
    for each in (each for group in groups for each in (group, *group.trajectories)):
        for name, value in each.metrics.items():
            number(f"the metric {name}", value)
        if isinstance(each, TrajectoryGroup):
            continue
        if each.reward is None:  # type: ignore[comparison]  # scripts assign what they like
            raise ConfigError(f"a reward is None; give a number, or math.nan if it is not known yet ({each})")
        if math.isinf(number("a reward", each.reward)):
            raise ConfigError(f"a reward of {each.reward} cannot be learned from; give a finite number ({each})")


def note(
    directory: Path, *, step: int, split: str, metrics: Mapping[str, float], at: float, model: str | None = None
) -> None:
    """Append one line with the metrics of a step to the history file, without those that are not finite.

    `at` is in seconds since the epoch, `model` the name of a model that is not trained.
    """
    line: dict[str, Any] = {"step": step, "at": at} | ({} if model is None else {"model": model})
    line |= {f"{split}/{name}": value for name, value in metrics.items() if math.isfinite(value)}
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    # One short write at the end of the file: lines of two scripts do not mix.
    with open(directory / HISTORY, "a", opener=private) as file:
        file.write(json.dumps(line) + "\n")


def history(directory: Path, metric: str) -> list[tuple[int, float]]:
    """Return (step, mean value) of a metric of the trained model, by step, for each step that has the metric."""
    values: defaultdict[int, list[float]] = defaultdict(list)
    for line in _lines(directory / HISTORY):
        if isinstance(value := line.get(metric), int | float) and math.isfinite(value) and "model" not in line:
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


def _state_path(directory: Path, model: str | None) -> Path:
    return directory / (_STATE if model is None else f"state-{quote(model, safe='')}.json")


def read_state(directory: Path, model: str | None = None) -> dict[str, Any] | None:
    """Return what the script has kept; `None` if it has kept nothing. `model` names one that is not trained.

    Raises a `ConfigError` if the file holds something else.
    """
    path = _state_path(directory, model)
    try:
        found: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; mend it, or delete it to begin anew") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no JSON object; mend it, or delete it to begin anew")
    return cast("dict[str, Any]", found)


def write_state(directory: Path, state: Mapping[str, Any], model: str | None = None) -> None:
    """Keep JSON values in place of those that were kept before; raises a `ConfigError` for others, and keeps those."""
    _check_state(state)
    try:
        text = json.dumps(state, indent=2)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"a state is a dictionary of JSON values: {error}; nothing was changed") from error
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_whole(_state_path(directory, model), text + "\n")


def _check_state(state: Any) -> None:
    if not isinstance(state, Mapping):
        raise ConfigError(f"a state is a dictionary of JSON values, and not {state!r}")


def merge_state(directory: Path, state: Mapping[str, Any], model: str | None = None) -> dict[str, Any]:
    """Add JSON values to those that are kept, objects within objects too, and return all; raises like the two above."""
    _check_state(state)
    merged = _merged(read_state(directory, model) or {}, state)
    write_state(directory, merged, model)
    return merged


def _merged(kept: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    def both(name: str, value: Any) -> Any:
        old = kept.get(name)
        return _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value

    return {**kept, **{name: both(name, value) for name, value in new.items()}}
