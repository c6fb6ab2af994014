"""Converts a script's rollouts to the store's records, as a recorded agent has them, and to lines of `history.jsonl`.

- Each choice becomes a call: its prompt is all messages before it, and its tokens are those that the choice carries. A
  choice that did not come through the model's own client carries no tokens. As for a recorded call,
  `trajectories.why_untrainable` decides whether the call can be trained on.
- A conversation without a choice becomes one call that is not trained on, so that it can be read and exported.
- The reward becomes the score `reward` of source `code`, and each metric becomes a score of its own. A NaN is not
  stored as a score.
- Siblings share a scenario: the group's `scenario_id`, or the one that all its trajectories have, else a hash of the
  task's text.

The history file, in the project's directory, gets one JSON line for each call of `train` and `log`, so a step may have
several lines. The names of metrics begin with their split: `val/reward`, `train/reward`, `train/loss`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

from openai.types.chat.chat_completion import Choice as SdkChoice

from art_patch import types
from art_patch._lib.ids import new_id
from art_patch.errors import ConfigError
from art_patch.grouping import task_key, task_of
from art_patch.rollouts.trajectory import Failure, History, Trajectory
from art_patch.trajectories import exact_of, why_untrainable
from art_patch.types import JSON, REPLAY, Call, Score

HISTORY = "history.jsonl"
REWARD = "reward"
SCENARIO = "scenario_id"
"""Key under which a group's or a trajectory's metadata names its scenario."""


class Siblings(Protocol):
    """The fields of a `TrajectoryGroup` that are stored; a protocol, because that class imports this module."""

    trajectories: list[Trajectory]
    exceptions: list[Failure]
    metadata: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Translated:
    """A group converted to store records.

    Write `records` (trajectories, calls, scores) before `group`, which refers to them.
    """

    group: types.Group
    records: tuple[types.Record, ...]


def translate(group: Siblings, *, about: JSON, held_out: bool, at: float) -> Translated:
    """Convert a group of a script to store records with new ids; rollouts that raised are left out.

    Args:
        about: metadata for each trajectory; where keys are equal, the group's metadata wins over it, and the
            trajectory's over both.
        held_out: true if the group must never be trained on.
        at: time for records that have no time of their own, in seconds since the epoch.
    """
    group_id = new_id(at)
    siblings = [_recorded(each, {**about, **group.metadata}, at) for each in group.trajectories]
    # Without a scenario the group stands alone; an empty key would make siblings of all such groups.
    scenario = _scenario(group, siblings) or f"group:{group_id}"
    siblings = [replace(each, info=replace(each.info, group_key=group_id)) for each in siblings]
    # A trajectory before its calls and scores, which refer to it.
    records = tuple(record for each in siblings for record in (each.info, *each.calls, *each.scores))
    return Translated(types.Group(group_id, scenario, "group_key", tuple(siblings), held_out=held_out), records)


def _recorded(trajectory: Trajectory, about: JSON, at: float) -> types.Trajectory:
    if math.isinf(trajectory.reward):
        raise ConfigError(
            f"a reward of {trajectory.reward} cannot be learned from; give a finite number ({trajectory})"
        )
    key = new_id(at)
    began = trajectory.start_time.timestamp()
    calls = tuple(call for history in trajectory.histories() for call in _calls(history, key, began))
    logs = {"logs": trajectory.logs} if trajectory.logs else {}
    info = types.TrajectoryInfo(
        id=key,
        started_at=min((call.started_at for call in calls), default=began),
        origin="explicit",
        ended_at=at,
        # A script's metadata must not name a function for the job to call.
        metadata={key: value for key, value in {**about, **trajectory.metadata}.items() if key != REPLAY} | logs,
    )
    return types.Trajectory(info, calls, _scores(trajectory, key, at))


def _calls(history: History, trajectory_id: str, began: float) -> list[Call]:
    said = history.messages()
    # By attribute and not by class: choices of other SDKs are answers, too, only without exact tokens.
    places = [place for place, item in enumerate(history.messages_and_choices) if hasattr(item, "message")]
    if not places:  # no choice: the last answer stands for the conversation, if there is one
        places = [place for place, message in enumerate(said) if message["role"] == "assistant"][-1:]
    return [
        _call(history.messages_and_choices[place], cast("Sequence[JSON]", said), place, history, trajectory_id, began)
        for place in places
    ]


def _call(item: Any, said: Sequence[JSON], place: int, history: History, trajectory_id: str, began: float) -> Call:
    exact = exact_of(item) if isinstance(item, SdkChoice) else None
    finish = item.finish_reason if isinstance(item, SdkChoice) else None
    answer = types.Choice(
        index=0,
        message=said[place],
        finish_reason=finish,
        token_ids=None if exact is None else exact.token_ids,
        logprobs=None if exact is None else exact.logprobs,
    )
    # A choice without exact tokens brings no time, policy or parameters; the defaults say so.
    call = Call(
        id=new_id(),
        trajectory_id=trajectory_id,
        started_at=began if exact is None else exact.started_at,
        requested_model="" if exact is None else exact.policy.partition("@")[0],
        messages=tuple(said[:place]),
        choices=(answer,),
        tools=tuple(cast("Sequence[JSON]", history.tools or ())),
        params={} if exact is None else exact.params,
        duration_ms=0.0 if exact is None else exact.duration_ms,
        policy=None if exact is None else exact.policy,
        prompt_token_ids=None if exact is None else exact.prompt_token_ids,
        prompt_tokens=0 if exact is None else exact.prompt_tokens,
        completion_tokens=len(answer.token_ids or ()),
    )
    # The verdict is part of the record, so that every reader of the store sees the same.
    return replace(call, untrainable=why_untrainable(call))


def _scores(trajectory: Trajectory, key: str, at: float) -> tuple[Score, ...]:
    # The reward comes last, so a metric of the same name cannot replace it.
    values: Mapping[str, float] = {**trajectory.metrics, REWARD: trajectory.reward}
    return tuple(
        Score(new_id(at), key, name, float(value), "code", at) for name, value in values.items() if math.isfinite(value)
    )


def _scenario(group: Siblings, siblings: Sequence[types.Trajectory]) -> str | None:
    given = {str(each.metadata[SCENARIO]) for each in group.trajectories if SCENARIO in each.metadata}
    if SCENARIO in group.metadata:
        given = {str(group.metadata[SCENARIO])}
    # Trajectories that name different scenarios are siblings all the same; then the text of the task names the group.
    if len(given) == 1:
        return f"scenario:{given.pop()}"
    first = next((each.calls[0] for each in siblings if each.calls), None)
    return None if first is None else task_key(task_of(first))


def metrics_of(groups: Sequence[Siblings]) -> dict[str, float]:
    """Return the mean of the reward and of each metric over all rollouts, and two metrics of the groups.

    `reward_std_dev` is the rewards' standard deviation within a group, averaged over groups. `exception_rate` is the
    share of rollouts that raised.
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
    if runs or raised:
        found["exception_rate"] = raised / (len(runs) + raised)
    return found


def note(directory: Path, *, step: int, split: str, metrics: Mapping[str, float], at: float) -> None:
    """Append one line with the metrics of a step to the history file; `at` is in seconds since the epoch."""
    line = {"step": step, "at": at} | {f"{split}/{name}": value for name, value in metrics.items()}
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    # One short write at the end of the file: lines of two scripts do not mix.
    with (directory / HISTORY).open("a") as file:
        file.write(json.dumps(line) + "\n")


def history(directory: Path, metric: str) -> list[tuple[int, float]]:
    """Return (step, mean value) of a metric for each step whose lines have the metric, in order of the steps."""
    values: defaultdict[int, list[float]] = defaultdict(list)
    for line in _lines(directory / HISTORY):
        if isinstance(value := line.get(metric), int | float):
            values[line["step"]].append(value)
    return [(step, statistics.fmean(values[step])) for step in sorted(values)]


def best_step(directory: Path, metric: str, steps: Iterable[int]) -> int | None:
    """Return the step, among `steps`, with the highest mean of a metric; `None` if no step has the metric.

    Of several steps with the same mean it returns the latest.
    """
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
