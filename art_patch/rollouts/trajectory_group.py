"""Rollouts of one scenario, compared with each other; those that raised are kept beside them.

`TrajectoryGroup(rollout(...) for _ in range(8))` of coroutines is something to await: the rollouts run at once, and
what raised becomes a `Failure` with the trajectory as far as it had come. Of trajectories it is the group itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Generator, Iterable, Iterator, Mapping
from typing import Any, Self, overload

from pydantic import BaseModel, Field

from art_patch.rollouts.at_once import run_all
from art_patch.rollouts.trajectory import Failure, Trajectory, failure_of
from art_patch.rollouts.translate import translate
from art_patch.types import Group, Score


class _Meta(type(BaseModel)):
    """Makes groups: of trajectories at once, of coroutines when awaited."""

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
        """Return the group, or what gives it when awaited if there is anything to wait for."""
        given = list(trajectories)
        rest: dict[str, Any] = {"metadata": metadata, "exceptions": list(exceptions), "logs": list(logs)}
        if any(isinstance(each, Awaitable) for each in given):
            return PendingGroup(given, rest)
        return super().__call__(given, **rest)


class TrajectoryGroup(BaseModel, metaclass=_Meta):
    """Siblings.

    Attributes:
        trajectories: of rollouts that came to their end.
        exceptions: of those that did not.
        metadata: JSON values; `scenario_id`, if it is there, names the scenario.
        logs: lines for people.
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
        """Hold what came of some rollouts.

        Args:
            trajectories: and exceptions in place of those that raised.
            metadata: see the class.
            exceptions: further ones.
            logs: see the class.
        """
        given: list[Any] = list(trajectories)
        raised: list[Any] = [each for each in given if isinstance(each, BaseException)] + list(exceptions)
        super().__init__(
            trajectories=[each for each in given if not isinstance(each, BaseException)],
            # those that are read from JSON are records already
            exceptions=[failure_of(each) if isinstance(each, BaseException) else each for each in raised],
            metadata=dict(metadata or {}),
            logs=list(logs),
        )

    def log(self, message: str) -> None:
        """Keep a line for people."""
        self.logs.append(message)

    def as_group(self) -> Group:
        """Return the siblings as the store and the judge take them."""
        return translate(self, about={}, held_out=False, at=time.time()).group

    def ranked(self, scored: Group) -> Self:
        """Return the group with the judge's scores for rewards, as `art_patch.rewards.ruler_score_group` gives it.

        The reward before becomes the metric `independent_reward`; the score is the metric `ruler_score` as well, and
        what the judge said is in the trajectory's log.
        """
        judged = [
            _judged(trajectory, sibling.scores[-1])
            for trajectory, sibling in zip(self.trajectories, scored.trajectories, strict=True)
        ]
        return self.model_copy(update={"trajectories": judged})

    def __iter__(self) -> Iterator[Trajectory]:  # type: ignore[override]
        """Go through the trajectories."""
        return iter(self.trajectories)

    def __len__(self) -> int:
        """Return how many trajectories there are."""
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
    """Rollouts that have not begun; awaiting gives their `TrajectoryGroup`."""

    def __init__(self, given: list[Any], rest: dict[str, Any]) -> None:
        """Hold them, and what else the group is made with."""
        self.given = given
        self._rest = rest

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.given)

    def __await__(self) -> Generator[Any, Any, TrajectoryGroup]:
        """Run them at once."""
        return self._run().__await__()

    async def _run(self) -> TrajectoryGroup:
        found: list[Trajectory | BaseException] = await run_all(self.given)
        return TrajectoryGroup(found, **self._rest)
