"""The records that trackers are given (episodes, training steps), the protocols of a tracker, and shared names. Pure.

An episode is a run of the agent as it is in the store, with its reward. A training step is one policy with everything
that the job recorded of it. Its nested metrics become flat ones, because every tracker plots those. A metric that was
not measured is left out, so that a curve has a gap and never a zero.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable
from urllib.parse import urlsplit

from art_patch.types import JSON, Policy, PolicyState, Trajectory

_BOOKKEEPING = frozenset({"checks", "config", "corrections_upto", "history", "job", "waits"})
_TRACE_ID = re.compile(r"[0-9a-f]{32}")
_DECIDED: Mapping[PolicyState, float] = {"champion": 1.0, "retired": 1.0, "rejected": 0.0}


@dataclass(frozen=True, slots=True)
class Episode:
    """A run of the agent.

    Attributes:
        trajectory: the run with its calls, spans and scores.
        reward: the reward that it is trained with; `None` if it was not judged.
    """

    trajectory: Trajectory
    reward: float | None = None

    @property
    def ended_at(self) -> float:
        """When its block, its last call or its last span ended, whichever was latest."""
        trajectory = self.trajectory
        # A run without a block has no end of its own, and a call can outlast the block: a stream that is read later.
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
            # The app goes on with the first choice; tools in the others were never called.
            for choice in call.choices[:1]
            for asked in cast("Sequence[Mapping[str, Any]]", choice.message.get("tool_calls") or ())
        )


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """One policy.

    Attributes:
        policy: the policy as it is in the store.
        metrics: by name, such as `train/kl_nats`, `gate/lower_bound`, `gate/won`, `reward/mean`; finite.
        history: metrics of each optimizer step of the update, in order; finite.
        params: settings of the update, such as `learning_rate`; JSON where a value is no text.
    """

    policy: Policy
    metrics: Mapping[str, float]
    history: tuple[Mapping[str, float], ...] = ()
    params: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to write to a tracker.

    Attributes:
        key: unique at the tracker.
        digest: changes with the content; an item that was sent with this digest is not sent again.
        payload: as the tracker's client takes it.
        trajectory_id: the run whose data it is; `None` for a policy's.
    """

    key: str
    digest: str
    payload: Any
    trajectory_id: str | None = None


class Tracker(Protocol):
    """A place where items are written. It also is a `MetricTracker`, a `TraceTracker`, or both.

    Attributes:
        name: the kind of tracker, such as `wandb`.
        target: the kind with its address, without secrets.
    """

    name: str
    target: str

    def write(self, items: Sequence[Item]) -> None:
        """Write items; return once the tracker has them.

        Raises:
            TrackerError: the tracker cannot be reached, or refused.
        """
        ...


@runtime_checkable
class MetricTracker(Tracker, Protocol):
    """A tracker for training steps."""

    def of_step(self, step: TrainingStep) -> Iterable[Item]:
        """Return the items of a policy."""
        ...


@runtime_checkable
class TraceTracker(Tracker, Protocol):
    """A tracker for runs of the agent; a tracker that is none is never given runs, and they are not read for it."""

    def of_episode(self, episode: Episode) -> Iterable[Item]:
        """Return the items of a run."""
        ...


@runtime_checkable
class TableTracker(TraceTracker, Protocol):
    """A tracker that also writes tables over all runs."""

    def of_episodes(self) -> Iterable[Item]:
        """Return the items of all runs together, after `of_episode` was called with each."""
        ...


def step_of(policy: Policy, rewards: Sequence[float] = ()) -> TrainingStep:
    """Return the training step of a policy; `rewards` are those of the runs that it answered alone."""
    metrics = dict(_flat(policy.metrics, ""))
    if policy.parent is not None and policy.state in _DECIDED:
        # A retired policy was the champion once, so it won. The base model was never at the gate.
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
        # Counts by reason have sentences for keys, which no tracker takes as a metric's name.
        if key in _BOOKKEEPING or not key.isidentifier():
            continue
        name = f"{prefix}{key}"
        if isinstance(value, bool | int | float):
            if math.isfinite(value):
                yield name, float(value)
        elif isinstance(value, Mapping):
            yield from _flat(cast("JSON", value), f"{name}/")


def without_login(url: str) -> str:
    """Return an address without user and password, for messages and logs."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl() if "@" in parts.netloc else url


def trace_id_of(trajectory_id: str) -> str:
    """Return the trace id, 32 hex digits, under which a run is sent: its own id if that is one, else a hash of it."""
    own = trajectory_id.lower()
    # A trace id of zeros is invalid by OpenTelemetry's specification.
    return own if _TRACE_ID.fullmatch(own) and int(own, 16) else hash_of(trajectory_id, 16).hex()


def hash_of(text: str, size: int) -> bytes:
    """Return a hash of `size` bytes, the same in every process, so that sending twice makes the same ids."""
    return hashlib.blake2b(text.encode(), digest_size=size).digest()
