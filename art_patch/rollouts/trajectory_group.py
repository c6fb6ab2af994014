"""Groups of rollouts of one scenario, which are compared with each other; many groups can be gathered at the same time.

If `TrajectoryGroup` is given coroutines, as in `TrajectoryGroup(rollout(...) for _ in range(8))`, it is a
`PendingGroup`: awaiting it runs the rollouts at the same time and returns the group. A rollout that raised becomes a
`Failure` in the group's `exceptions`, with the trajectory that it had made so far.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, overload

from pydantic import BaseModel, Field

from art_patch.rollouts.at_once import at_once, gathering, run_all
from art_patch.rollouts.records import translate
from art_patch.rollouts.trajectory import Failure, Trajectory, failure_of
from art_patch.types import Group, Score


class _Meta(type(BaseModel)):
    """Lets `TrajectoryGroup(...)` return a `PendingGroup` where coroutines are given."""

    @overload
    def __call__(
        cls,
        trajectories: Iterable[Awaitable[Trajectory]],
        *,
        metadata: Mapping[str, Any] | None = ...,
        exceptions: Iterable[BaseException] = ...,
        logs: Iterable[str] = ...,
    ) -> PendingGroup: ...

    @overload
    def __call__(
        cls,
        trajectories: Iterable[Trajectory | BaseException] = ...,
        *,
        metadata: Mapping[str, Any] | None = ...,
        exceptions: Iterable[BaseException] = ...,
        logs: Iterable[str] = ...,
    ) -> TrajectoryGroup: ...

    def __call__(
        cls,
        trajectories: Iterable[Any] = (),
        *,
        metadata: Mapping[str, Any] | None = None,
        exceptions: Iterable[Any] = (),
        logs: Iterable[str] = (),
    ) -> TrajectoryGroup | PendingGroup:
        """Return the group, or a `PendingGroup` if any of `trajectories` is awaitable."""
        given = list(trajectories)  # read once: a generator cannot be read a second time
        rest: dict[str, Any] = {"metadata": metadata, "exceptions": list(exceptions), "logs": list(logs)}
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
        logs: lines of free text for people to read.
    """

    trajectories: list[Trajectory] = Field(default_factory=list[Trajectory])
    exceptions: list[Failure] = Field(default_factory=list[Failure])
    metadata: dict[str, Any] = Field(default_factory=dict)
    logs: list[str] = Field(default_factory=list)

    def __init__(
        self,
        trajectories: Iterable[Trajectory | BaseException] = (),
        *,
        metadata: Mapping[str, Any] | None = None,
        exceptions: Iterable[BaseException] = (),
        logs: Iterable[str] = (),
    ) -> None:
        """Create a group from the results of rollouts; exceptions among `trajectories` are added to `exceptions`."""
        given = list(trajectories)
        raised: list[Any] = [*(each for each in given if isinstance(each, BaseException)), *exceptions]
        super().__init__(
            trajectories=[each for each in given if not isinstance(each, BaseException)],
            # exceptions that are read from JSON are records already
            exceptions=[failure_of(each) if isinstance(each, BaseException) else each for each in raised],
            metadata=dict(metadata or {}),
            logs=list(logs),
        )

    def log(self, message: str) -> None:
        """Append a line to the group's `logs`."""
        self.logs.append(message)

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

    def __await__(self) -> Generator[Any, Any, TrajectoryGroup]:
        """Run the rollouts at the same time, and return their group."""
        return self._run().__await__()

    async def _run(self) -> TrajectoryGroup:
        found: list[Trajectory | BaseException] = await run_all(self._given)
        return TrajectoryGroup(found, **self._rest)


AfterEach = Callable[[TrajectoryGroup], Awaitable[TrajectoryGroup | list[TrajectoryGroup] | None]]


@overload
async def gather_trajectories(
    trajectories: Iterable[Awaitable[Trajectory]], *, pbar_desc: str | None = ..., max_exceptions: float = ...
) -> list[Trajectory | BaseException]: ...


@overload
async def gather_trajectories(
    trajectories: Iterable[Awaitable[Iterable[Trajectory]]], *, pbar_desc: str | None = ..., max_exceptions: float = ...
) -> list[list[Trajectory] | BaseException]: ...


async def gather_trajectories(
    trajectories: Iterable[Awaitable[Trajectory]] | Iterable[Awaitable[Iterable[Trajectory]]],
    *,
    pbar_desc: str | None = "gather",
    max_exceptions: float = 0,
) -> Sequence[Trajectory | list[Trajectory] | BaseException]:
    """Run rollouts at the same time and return their results in order; a rollout that raised gives its exception.

    Args:
        trajectories: coroutines, each of which returns one trajectory or several.
        pbar_desc: text beside the progress bar; `None` shows no bar.
        max_exceptions: number of rollouts that may raise, or their share if below 1; the exception of one more is
            raised here.
    """
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
) -> list[TrajectoryGroup]:
    """Run the rollouts of all groups at the same time and return the groups, in order.

    Args:
        groups: `TrajectoryGroup(rollout(...) for ...)`, or coroutines that each return a group.
        pbar_desc: as for `gather_trajectories`, like `max_exceptions`.
        max_metrics: number of metrics shown beside the bar; `None` shows all.
        after_each: coroutine function that is called with each group when it is complete, for example to judge it. Its
            result takes the group's place in the list: one group, a list of groups, or `None` to drop the group.
    """
    waiting = list(groups)
    # The length of a group that a coroutine makes is not known yet; it counts as one rollout.
    total = sum(len(each) if isinstance(each, PendingGroup) else 1 for each in waiting)

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

    with gathering(pbar_desc, total, max_exceptions, max_metrics):
        found = await at_once([one(group) for group in waiting])
    return [group for of_one in found for group in of_one]
