"""What a tracker is told, as plain records: episodes, and the steps of training. Pure; knows no tracker.

An episode is a run of the agent as it is in the store, with what it is learned by. A step is what the job keeps of one
policy; its metrics become flat metrics, because that is what every tracker plots. A metric that nobody measured is left
out: a gap in a curve, never a zero.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from art_patch.types import JSON, Policy, PolicyState, Trajectory

_BOOKKEEPING = frozenset({"checks", "config", "corrections_upto", "history", "job", "waits"})
_DECIDED: Mapping[PolicyState, float] = {"champion": 1.0, "retired": 1.0, "rejected": 0.0}


@dataclass(frozen=True, slots=True)
class Episode:
    """A run of the agent.

    Attributes:
        trajectory: with its calls, spans and scores.
        reward: what it is learned by; `None` if nobody judged it.
    """

    trajectory: Trajectory
    reward: float | None = None

    @property
    def ended_at(self) -> float:
        """When its block, its last call or its last span ended, whichever was latest."""
        trajectory = self.trajectory
        calls = (call.started_at + call.duration_ms / 1000 for call in trajectory.calls)
        spans = (span.ended_at or span.started_at for span in trajectory.spans)
        return max(trajectory.info.ended_at or trajectory.info.started_at, *calls, *spans, trajectory.info.started_at)

    @property
    def failed(self) -> bool:
        """Whether its block or one of its calls failed."""
        return self.trajectory.info.error is not None or any(call.status != "ok" for call in self.trajectory.calls)

    @property
    def actions(self) -> Counter[str]:
        """How often the agent asked for each tool."""
        return Counter(
            str(cast("Mapping[str, Any]", asked.get("function") or {}).get("name"))
            for call in self.trajectory.calls
            for choice in call.choices[:1]
            for asked in cast("Sequence[Mapping[str, Any]]", choice.message.get("tool_calls") or ())
        )


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """One policy.

    Attributes:
        policy: it.
        metrics: by name, such as `train/kl_nats`, `gate/lower_bound`, `gate/won`, `reward/mean`; finite.
        history: metrics of each optimizer step of the update, in order; finite.
        params: what the update was set to, such as `learning_rate`; JSON where it is no text.
    """

    policy: Policy
    metrics: Mapping[str, float]
    history: tuple[Mapping[str, float], ...] = ()
    params: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that a tracker is to have.

    Attributes:
        key: unique at the tracker.
        digest: of what it is now; a tracker that has this one is not sent it again.
        payload: as the tracker's client takes it.
        trajectory_id: whose data it is; `None` for a policy's.
    """

    key: str
    digest: str
    payload: Any
    trajectory_id: str | None = None


class Tracker(Protocol):
    """Where items go.

    Attributes:
        name: of the kind.
        target: the kind with its address, without secrets.
        takes_episodes: whether it has a place for runs; they are not read for one that has none.
    """

    name: str
    target: str
    takes_episodes: bool

    def of_step(self, step: TrainingStep) -> Iterable[Item]:
        """Return what it is to have of a policy."""
        ...

    def of_episode(self, episode: Episode) -> Iterable[Item]:
        """Return what it is to have of a run."""
        ...

    def of_episodes(self) -> Iterable[Item]:
        """Return what it is to have of all runs together, once it was told of each."""
        ...

    def write(self, items: Sequence[Item]) -> None:
        """Write them; return once the tracker has them.

        Raises:
            TrackerError: it cannot be reached, or refused.
        """
        ...


def step_of(policy: Policy, rewards: Sequence[float] = ()) -> TrainingStep:
    """Return what is told of a policy.

    Args:
        policy: with its metrics.
        rewards: of the runs that it answered alone.
    """
    metrics = dict(_flat(policy.metrics, ""))
    if policy.parent is not None and policy.state in _DECIDED:
        metrics["gate/won"] = _DECIDED[policy.state]
    if rewards:
        metrics |= {"reward/mean": math.fsum(rewards) / len(rewards), "reward/runs": float(len(rewards))}
    train = cast("JSON", policy.metrics.get("train") or {})
    config = cast("JSON", train.get("config") or {})
    return TrainingStep(
        policy,
        dict(sorted(metrics.items())),
        tuple(dict(_flat(one, "")) for one in cast("Sequence[JSON]", train.get("history") or ())),
        {key: value if isinstance(value, str) else json.dumps(value) for key, value in sorted(config.items())},
    )


def _flat(metrics: JSON, prefix: str) -> Iterable[tuple[str, float]]:
    for key, value in metrics.items():
        if key in _BOOKKEEPING or not key.isidentifier():  # counts by reason: sentences are no names
            continue
        name = f"{prefix}{key}"
        if isinstance(value, bool | int | float):
            if math.isfinite(value):
                yield name, float(value)
        elif isinstance(value, Mapping):
            yield from _flat(cast("JSON", value), f"{name}/")
