"""Groups of rollouts of one scenario, which are compared with each other; many groups can be gathered at the same time.

If `TrajectoryGroup` is given coroutines, as in `TrajectoryGroup(rollout(...) for _ in range(8))`, it is a
`PendingGroup`: awaiting it runs the rollouts at the same time and returns the group. A rollout that raised becomes a
`Failure` in the group's `exceptions`, with the trajectory that it had made so far.

`translate` converts a group to the store's records, as a recorded agent has them:

- Each choice becomes a call: its prompt is all messages before it, and its tokens are those that the choice carries. A
  choice that did not come through the model's own client carries no tokens, so it is not trained on.
- A conversation without a choice becomes one call that is not trained on, so that it can be read and exported.
- The reward and each metric become scores of source `code`. A NaN is not stored as a score.
- Siblings share a scenario: the group's `scenario_id`, or the one of all its trajectories, else the task text's hash.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, cast, overload

from openai.types.chat.chat_completion import Choice as SdkChoice
from pydantic import BaseModel, Field, PrivateAttr

from art_patch import grouping, trajectories, types
from art_patch._lib.ids import new_id
from art_patch.errors import ConfigError
from art_patch.rollouts.at_once import at_once, gathering, run_all
from art_patch.rollouts.trajectory import Failure, History, Trajectory, failure_of
from art_patch.types import JSON, REPLAY, Call, Group, Score

SCENARIO = "scenario_id"
"""Key under which a group's or a trajectory's metadata names its scenario."""


class _Meta(type(BaseModel)):
    """Lets `TrajectoryGroup(...)` return a `PendingGroup` where coroutines are given."""

    @overload
    def __call__(
        cls,
        trajectories: Iterable[Awaitable[Trajectory]],
        *,
        exceptions: Iterable[BaseException] = ...,
        **about: Any,
    ) -> PendingGroup: ...

    @overload
    def __call__(
        cls,
        trajectories: Iterable[Trajectory | BaseException] = ...,
        *,
        exceptions: Iterable[BaseException] = ...,
        **about: Any,
    ) -> TrajectoryGroup: ...

    def __call__(
        cls,
        trajectories: Iterable[Any] = (),
        *,
        exceptions: Iterable[Any] = (),
        **about: Any,
    ) -> TrajectoryGroup | PendingGroup:
        """Return the group, or a `PendingGroup` if any of `trajectories` is awaitable."""
        given = list(trajectories)  # read once: a generator cannot be read a second time
        rest: dict[str, Any] = {"exceptions": list(exceptions), **about}
        # One coroutine makes the group pending; finished trajectories beside it are taken as they are.
        if any(isinstance(each, Awaitable) for each in given):
            return PendingGroup(given, rest)
        return super().__call__(given, **rest)


class TrajectoryGroup(BaseModel, metaclass=_Meta):
    """The rollouts of one scenario (siblings), whose rewards are compared with each other.

    Attributes:
        trajectories: the rollouts that finished without an exception.
        exceptions: a `Failure` for each rollout that raised an exception.
        metadata: JSON values that are stored with each rollout; `scenario_id`, if given, names the scenario.
        metrics: numbers about the group as a whole; the history has their means over groups, as `group_NAME`.
        logs: lines of free text for people to read.
    """

    trajectories: list[Trajectory] = Field(default_factory=list[Trajectory])
    exceptions: list[Failure] = Field(default_factory=list[Failure])
    metadata: dict[str, Any] = Field(default_factory=dict)
    metrics: dict[str, float | int | bool] = Field(default_factory=dict)
    logs: list[str] = Field(default_factory=list)
    _stored: tuple[Any, str] | None = PrivateAttr(None)  # of `note_stored`

    def __init__(
        self,
        trajectories: Iterable[Trajectory | BaseException] = (),
        *,
        metadata: Mapping[str, Any] | None = None,
        exceptions: Iterable[BaseException] = (),
        metrics: Mapping[str, float] | None = None,
        logs: Iterable[str] | None = None,
        model: Any = None,
    ) -> None:
        """Create a group from the results of rollouts; exceptions among `trajectories` are added to `exceptions`.

        `model` is the model that ran them; its name becomes the metadata `model`.
        """
        given = list(trajectories)
        raised: list[Any] = [*(each for each in given if isinstance(each, BaseException)), *exceptions]
        super().__init__(
            trajectories=[each for each in given if not isinstance(each, BaseException)],
            # exceptions that are read from JSON are records already
            exceptions=[failure_of(each) if isinstance(each, BaseException) else each for each in raised],
            metadata=({} if model is None else {"model": getattr(model, "name", model)}) | dict(metadata or {}),
            metrics=dict(metrics or {}),
            logs=list(logs or ()),
        )

    def log(self, message: str) -> None:
        """Append a line to the group's `logs`."""
        self.logs.append(message)

    def note_stored(self, mark: Any, group_id: str) -> None:
        """Note that the group is stored under this id; `mark` tells where, and what of it."""
        self._stored = mark, group_id

    def stored_as(self, mark: Any) -> str | None:
        """Return the id under which the group is stored, if `note_stored` was called with this mark last."""
        return self._stored[1] if self._stored is not None and self._stored[0] == mark else None

    def as_group(self) -> Group:
        """Return the group as the `Group` record that the judge takes; nothing is stored."""
        return translate(self, about={}, held_out=False, at=time.time())

    def ranked(self, scored: Group) -> Self:
        """Return a copy of the group with the judge's scores as rewards, and its comments in the `logs`.

        The former reward becomes the metric `independent_reward`, and the judge's score the metric `ruler_score`, too.
        """
        pairs = zip(self.trajectories, scored.trajectories, strict=True)
        judged = [_judged(trajectory, sibling.scores[-1]) for trajectory, sibling in pairs]
        # A copy, so that the script may judge the same group again with another rubric.
        return self.model_copy(update={"trajectories": judged})

    def __iter__(self) -> Iterator[Trajectory]:  # type: ignore[override]
        """Iterate over the trajectories, without the exceptions."""
        return iter(self.trajectories)

    def __len__(self) -> int:
        """Return the number of trajectories, without the exceptions."""
        return len(self.trajectories)


def _judged(trajectory: Trajectory, score: Score) -> Trajectory:
    before = {"independent_reward": trajectory.reward} if math.isfinite(trajectory.reward) else {}
    said = [f"RULER: {score.comment}"] if score.comment else []
    return trajectory.model_copy(
        update={
            "reward": score.value,
            "metrics": {**trajectory.metrics, **before, "ruler_score": score.value},
            "logs": [*trajectory.logs, *said],
        }
    )


class PendingGroup:
    """Rollouts that have not started; awaiting the object runs them and returns their `TrajectoryGroup`."""

    def __init__(self, given: list[Any], rest: dict[str, Any]) -> None:
        self._given = given  # the rollouts
        self._rest = rest  # the group's other arguments

    def __len__(self) -> int:
        """Return the number of rollouts that will run."""
        return len(self._given)

    def close(self) -> None:
        """Drop rollouts that will not be run, or Python would warn that they were never awaited."""
        for each in self._given:
            if isinstance(each, Coroutine):
                each.close()

    def __await__(self) -> Generator[Any, Any, TrajectoryGroup]:
        """Run the rollouts at the same time, and return their group."""
        return self._run().__await__()

    async def _run(self) -> TrajectoryGroup:
        found: list[Trajectory | BaseException] = await run_all(self._given)
        return TrajectoryGroup(found, **self._rest)


def rollouts_of(groups: Sequence[Awaitable[TrajectoryGroup]]) -> int:
    """Return how many rollouts will run; a group that a coroutine makes counts as one, since its length is unknown."""
    return sum(len(each) if isinstance(each, PendingGroup) else 1 for each in groups)


AfterEach = Callable[[TrajectoryGroup], Awaitable[TrajectoryGroup | list[TrajectoryGroup] | None]]


@overload
async def gather_trajectories(
    trajectories: Iterable[Awaitable[Trajectory]],
    *,
    pbar_desc: str | None = ...,
    max_exceptions: float = ...,
    pbar_total_completion_tokens: bool | None = ...,
) -> list[Trajectory | BaseException]: ...


@overload
async def gather_trajectories(
    trajectories: Iterable[Awaitable[Iterable[Trajectory]]],
    *,
    pbar_desc: str | None = ...,
    max_exceptions: float = ...,
    pbar_total_completion_tokens: bool | None = ...,
) -> list[list[Trajectory] | BaseException]: ...


async def gather_trajectories(
    trajectories: Iterable[Awaitable[Trajectory]] | Iterable[Awaitable[Iterable[Trajectory]]],
    *,
    pbar_desc: str | None = "gather",
    max_exceptions: float = 0,
    pbar_total_completion_tokens: bool | None = None,
) -> Sequence[Trajectory | list[Trajectory] | BaseException]:
    """Run rollouts at the same time and return their results in order; a rollout that raised gives its exception.

    Args:
        trajectories: coroutines, each of which returns one trajectory or several.
        pbar_desc: text beside the progress bar; `None` shows no bar.
        max_exceptions: number of rollouts that may raise, or their share if below 1; the exception of one more is
            raised here.
        pbar_total_completion_tokens: of older scripts; the bar shows the mean of `completion_tokens` in any case.
    """
    _say_tokens_are_shown(pbar_total_completion_tokens)
    rollouts: list[Awaitable[Any]] = list(trajectories)
    with gathering(pbar_desc, len(rollouts), max_exceptions, None):
        found = await run_all(rollouts)
    return [each if isinstance(each, Trajectory | BaseException) else list(each) for each in found]


async def gather_trajectory_groups(
    groups: Iterable[Awaitable[TrajectoryGroup]],
    *,
    pbar_desc: str | None = "gather",
    max_exceptions: float = 0,
    max_metrics: int | None = None,
    after_each: AfterEach | None = None,
    pbar_total_completion_tokens: bool | None = None,
) -> list[TrajectoryGroup]:
    """Run the rollouts of all groups at the same time and return the groups, in order.

    Args:
        groups: `TrajectoryGroup(rollout(...) for ...)`, or coroutines that each return a group.
        pbar_desc: as for `gather_trajectories`, like `max_exceptions`.
        max_metrics: number of metrics shown beside the bar; `None` shows all.
        after_each: coroutine function that is called with each group when it is complete, for example to judge it. Its
            result takes the group's place in the list: one group, a list of groups, or `None` to drop the group.
        pbar_total_completion_tokens: of older scripts; `gather_trajectories` says what it means.
    """
    _say_tokens_are_shown(pbar_total_completion_tokens)
    waiting = list(groups)

    async def one(group: Awaitable[TrajectoryGroup]) -> list[TrajectoryGroup]:
        if isinstance(group, PendingGroup):
            there = await group  # it counts its rollouts itself
        else:
            (only,) = await run_all([group])
            # The coroutine itself raised, so there is no group; the exception is counted.
            if isinstance(only, BaseException):
                return []
            there = only
        after = there if after_each is None else await after_each(there)
        return [] if after is None else after if isinstance(after, list) else [after]

    with gathering(pbar_desc, rollouts_of(waiting), max_exceptions, max_metrics):
        found = await at_once([one(group) for group in waiting])
    return [group for of_one in found for group in of_one]


def _say_tokens_are_shown(asked: bool | None) -> None:
    if asked is not None:
        words = "pbar_total_completion_tokens: the bar shows the mean of completion_tokens in any case; leave it out"
        warnings.warn(words, DeprecationWarning, stacklevel=3)


# --- records of the store ---


def translate(group: TrajectoryGroup, *, about: JSON, held_out: bool, at: float) -> Group:
    """Convert a group of a script to a store record with new ids; rollouts that raised are left out.

    `about` is metadata for each trajectory; the group's wins over it, and the trajectory's over both. A `held_out`
    group is never trained on. `at` is the time of records without their own, in seconds since the epoch.
    """
    group_id = new_id(at)
    siblings = tuple(_recorded(each, {**about, **group.metadata}, group_id, at) for each in group.trajectories)
    # Without a scenario the group stands alone; an empty key would make siblings of all such groups.
    scenario = _scenario(group, siblings) or f"group:{group_id}"
    return Group(group_id, scenario, "group_key", siblings, held_out=held_out)


def content_of(group: TrajectoryGroup) -> Any:
    """Return what changes if anything of the group changes that `translate` reads, but for a message in its place."""
    about = repr((group.metadata, group.logs))
    said = ((id(each), [len(history.messages_and_choices) for history in each.histories()]) for each in group)
    return about, [(*of, repr((each.reward, each.metrics, each.metadata, each.logs)))
                   for of, each in zip(said, group, strict=True)]  # fmt: skip


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


def _scenario(group: TrajectoryGroup, siblings: Sequence[types.Trajectory]) -> str | None:
    given = {str(each.metadata[SCENARIO]) for each in group.trajectories if SCENARIO in each.metadata}
    if SCENARIO in group.metadata:
        given = {str(group.metadata[SCENARIO])}
    # Trajectories that name different scenarios are siblings all the same; then the text of the task names the group.
    if len(given) == 1:
        return f"scenario:{given.pop()}"
    first = next((each.calls[0] for each in siblings if each.calls), None)
    return None if first is None else grouping.task_key(grouping.task_of(first))
