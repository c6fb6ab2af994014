"""Converts a script's rollouts to the store's records, as a recorded agent has them, and to lines of `history.jsonl`.

- Each choice becomes a call: its prompt is all messages before it, and its tokens are those that the choice carries. A
  choice that did not come through the model's own client carries no tokens, so it is not trained on.
- A conversation without a choice becomes one call that is not trained on, so that it can be read and exported.
- The reward and each metric become scores of source `code`. A NaN is not stored as a score.
- Siblings share a scenario: the group's `scenario_id`, or the one of all its trajectories, else the task text's hash.

The history file, in the project's directory, gets one JSON line for each call of `train` and `log`, so a step may have
several lines. The names of metrics begin with their split: `val/reward`, `train/reward`, `train/loss`.
"""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

from openai.types.chat.chat_completion import Choice as SdkChoice

from art_patch import grouping, trajectories, types
from art_patch._lib.atomic_files import private
from art_patch._lib.ids import new_id
from art_patch.errors import ConfigError
from art_patch.rollouts.trajectory import Failure, History, Trajectory
from art_patch.types import JSON, REPLAY, Call, Score

HISTORY = "history.jsonl"
SCENARIO = "scenario_id"
"""Key under which a group's or a trajectory's metadata names its scenario."""


class Siblings(Protocol):
    """The fields of a `TrajectoryGroup` that are stored; a protocol, because that class imports this module."""

    trajectories: list[Trajectory]
    exceptions: list[Failure]
    metadata: dict[str, Any]


def translate(group: Siblings, *, about: JSON, held_out: bool, at: float) -> types.Group:
    """Convert a group of a script to a store record with new ids; rollouts that raised are left out.

    `about` is metadata for each trajectory; the group's wins over it, and the trajectory's over both. A `held_out`
    group is never trained on. `at` is the time of records without their own, in seconds since the epoch.
    """
    group_id = new_id(at)
    siblings = tuple(_recorded(each, {**about, **group.metadata}, group_id, at) for each in group.trajectories)
    # Without a scenario the group stands alone; an empty key would make siblings of all such groups.
    scenario = _scenario(group, siblings) or f"group:{group_id}"
    return types.Group(group_id, scenario, "group_key", siblings, held_out=held_out)


def _recorded(trajectory: Trajectory, about: JSON, group_id: str, at: float) -> types.Trajectory:
    if math.isinf(reward := trajectory.reward):
        raise ConfigError(f"a reward of {reward} cannot be learned from; give a finite number ({trajectory})")
    key = new_id(at)
    began = trajectory.start_time.timestamp()
    calls = tuple(call for history in trajectory.histories() for call in _calls(history, key, began))
    logs = {"logs": trajectory.logs} if trajectory.logs else {}
    info = types.TrajectoryInfo(
        id=key,
        started_at=min((call.started_at for call in calls), default=began),
        origin="explicit",
        ended_at=at,
        group_key=group_id,
        # A script's metadata must not name a function for the job to call.
        metadata={key: value for key, value in {**about, **trajectory.metadata}.items() if key != REPLAY} | logs,
    )
    return types.Trajectory(info, calls, _scores(trajectory, key, at))


def _calls(history: History, trajectory_id: str, began: float) -> list[Call]:
    items, said = history.messages_and_choices, cast("Sequence[JSON]", history.messages())
    # By attribute and not by class: choices of other SDKs are answers, too, only without exact tokens.
    places = [place for place, item in enumerate(items) if hasattr(item, "message")]
    if not places:  # no choice: the last answer stands for the conversation, if there is one
        places = [place for place, message in enumerate(said) if message["role"] == "assistant"][-1:]
    tools = tuple(cast("Sequence[JSON]", history.tools or ()))
    # A choice without exact tokens brings no time, policy or parameters; the defaults say so.
    calls = [Call(new_id(), trajectory_id, began, "", tuple(said[:place]), tools=tools) for place in places]
    return [_answered(call, items[place], said[place]) for call, place in zip(calls, places, strict=True)]


def _answered(call: Call, item: Any, message: JSON) -> Call:
    exact = trajectories.exact_of(item) if isinstance(item, SdkChoice) else None
    answer = types.Choice(0, message, item.finish_reason if isinstance(item, SdkChoice) else None)
    if exact is not None:
        answer = replace(answer, token_ids=exact.token_ids, logprobs=exact.logprobs)
        call = replace(
            call,
            started_at=exact.started_at,
            requested_model=exact.policy.partition("@")[0],
            params=exact.params,
            duration_ms=exact.duration_ms,
            policy=exact.policy,
            prompt_token_ids=exact.prompt_token_ids,
            prompt_tokens=exact.prompt_tokens,
            completion_tokens=len(exact.token_ids or ()),
        )
    call = replace(call, choices=(answer,))
    # The verdict is part of the record, so that every reader of the store sees the same.
    return replace(call, untrainable=trajectories.why_untrainable(call))


def _scores(trajectory: Trajectory, key: str, at: float) -> tuple[Score, ...]:
    # The reward comes last, so a metric of the same name cannot replace it.
    values = trajectory.metrics | {"reward": trajectory.reward}
    finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
    return tuple(Score(new_id(at), key, name, value, "code", at) for name, value in finite.items())


def _scenario(group: Siblings, siblings: Sequence[types.Trajectory]) -> str | None:
    given = {str(each.metadata[SCENARIO]) for each in group.trajectories if SCENARIO in each.metadata}
    if SCENARIO in group.metadata:
        given = {str(group.metadata[SCENARIO])}
    # Trajectories that name different scenarios are siblings all the same; then the text of the task names the group.
    if len(given) == 1:
        return f"scenario:{given.pop()}"
    first = next((each.calls[0] for each in siblings if each.calls), None)
    return None if first is None else grouping.task_key(grouping.task_of(first))


def metrics_of(groups: Sequence[Siblings]) -> dict[str, float]:
    """Return the mean of the reward and of each metric over all rollouts, and two metrics of the groups.

    `reward_std_dev` is the mean of the groups' standard deviations, `exception_rate` the share of rollouts that raised.
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
