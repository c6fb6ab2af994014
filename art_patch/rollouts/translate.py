"""Rollouts -> the store's own records, the same as if an agent had been recorded.

- Each choice becomes a call: its prompt is everything before it, its tokens are those that it carries. The same test as
  for any call says whether it can be trained on (`trajectories.why_untrainable`). A choice that did not come through
  the model's own client carries no tokens.
- A conversation without a choice becomes one call that is not trained on, so that it can be read and exported.
- The reward becomes the score `reward` of source `code`, each metric a score beside it; NaN becomes none.
- Siblings share a scenario: the group's `scenario_id`, or that of all its trajectories, else a hash of the task's text.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from openai.types.chat.chat_completion import Choice as SdkChoice

from art_patch._lib.ids import new_id
from art_patch.errors import ConfigError
from art_patch.grouping import task_key, task_of
from art_patch.rollouts.trajectory import History, Trajectory
from art_patch.trajectories import exact_of, why_untrainable
from art_patch.types import JSON, REPLAY, Call, Choice, Group, Record, Score, TrajectoryInfo
from art_patch.types import Trajectory as Recorded

REWARD = "reward"
SCENARIO = "scenario_id"
"""Key of a group's or a trajectory's metadata."""


class Siblings(Protocol):
    """The part of a `TrajectoryGroup` that is translated; the class itself imports this module."""

    trajectories: list[Trajectory]
    metadata: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Translated:
    """A group as records.

    Attributes:
        group: the siblings with their calls.
        records: everything to write before the group: trajectories, calls and scores.
    """

    group: Group
    records: tuple[Record, ...]


def translate(group: Siblings, *, about: JSON, held_out: bool, at: float) -> Translated:
    """Return a group as records, under new ids.

    Args:
        group: a group of rollouts; failures are left out.
        about: added to each trajectory's metadata, under the group's and its own.
        held_out: whether the group is never to be trained on.
        at: time of the records that bring none, seconds since the epoch.

    Raises:
        ConfigError: a reward is infinite.
    """
    group_id = new_id(at)
    siblings = [_recorded(each, {**about, **group.metadata}, at) for each in group.trajectories]
    # Without a scenario the group stands alone; an empty key would make siblings of all such groups.
    scenario = _scenario(group, siblings) or f"group:{group_id}"
    siblings = [replace(each, info=replace(each.info, group_key=group_id)) for each in siblings]
    # A trajectory before its calls and scores, which refer to it.
    records = tuple(record for each in siblings for record in (each.info, *each.calls, *each.scores))
    return Translated(Group(group_id, scenario, "group_key", tuple(siblings), held_out=held_out), records)


def _recorded(trajectory: Trajectory, about: JSON, at: float) -> Recorded:
    if math.isinf(trajectory.reward):
        raise ConfigError(
            f"a reward of {trajectory.reward} cannot be learned from; give a finite number ({trajectory})"
        )
    key = new_id(at)
    began = trajectory.start_time.timestamp()
    calls = tuple(call for history in trajectory.histories() for call in _calls(history, key, began))
    logs = {"logs": trajectory.logs} if trajectory.logs else {}
    info = TrajectoryInfo(
        id=key,
        started_at=min((call.started_at for call in calls), default=began),
        origin="explicit",
        ended_at=at,
        # A script's metadata must not name a function for the job to call.
        metadata={key: value for key, value in {**about, **trajectory.metadata}.items() if key != REPLAY} | logs,
    )
    return Recorded(info, calls, _scores(trajectory, key, at))


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
    answer = Choice(
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


def _scenario(group: Siblings, siblings: Sequence[Recorded]) -> str | None:
    given = {str(each.metadata[SCENARIO]) for each in group.trajectories if SCENARIO in each.metadata}
    if SCENARIO in group.metadata:
        given = {str(group.metadata[SCENARIO])}
    # Trajectories that name different scenarios are siblings all the same; then the text of the task names the group.
    if len(given) == 1:
        return f"scenario:{given.pop()}"
    first = next((each.calls[0] for each in siblings if each.calls), None)
    return None if first is None else task_key(task_of(first))
