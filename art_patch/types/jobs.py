"""What the job makes of the records that it reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from art_patch.types.app_records import JSON, PolicyState, Score, SpanInfo, TrajectoryInfo
from art_patch.types.calls import Call


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A trajectory as the job reads it: its calls in the order they started, its scores and its spans."""

    info: TrajectoryInfo
    calls: tuple[Call, ...]
    scores: tuple[Score, ...] = ()
    spans: tuple[SpanInfo, ...] = ()

    @property
    def id(self) -> str:
        """The trajectory's id."""
        return self.info.id


@dataclass(frozen=True, slots=True)
class Group:
    """Siblings: trajectories of one scenario that are scored and learned from together.

    Attributes:
        id: uuid7 hex.
        scenario_key: key of the scenario.
        how: how the group came about: `group_key`, `scenario_key`, `sibling_spans`, `same_task`, `near_duplicate` or
            `resampled`; `single` is one held-out run, which only the gate uses.
        trajectories: two or more siblings.
        held_out: a scenario kept for the gate; never trained on.
        followed: for `resampled`, the messages that really came after the turn that the siblings answer.
    """

    id: str
    scenario_key: str
    how: str
    trajectories: tuple[Trajectory, ...]
    held_out: bool = False
    followed: tuple[JSON, ...] = ()


@dataclass(frozen=True, slots=True)
class Judgement:
    """A group put to a judge: what it took and how it ended. The scores stand beside it, as `Score`.

    Attributes:
        id: unique; writing the same id again replaces it.
        group_id: what was judged.
        at: when.
        judge: model that was asked.
        rubric: version of the rubric that was used.
        purpose: `score` to learn from, `gate` to test a candidate, ...
        state: `ok`, every sibling has a score; `failed`, none has.
        reason: why it failed.
        calls: requests made, repair tries and retries included.
        prompt_tokens: as the judge's server counted them.
        completion_tokens: as the judge's server counted them.
        cost_usd: `None` where the price of an answer is not known.
        facts: further findings, such as the order of the siblings and the parts that the group was split into.
    """

    id: str
    group_id: str
    at: float
    judge: str
    rubric: str
    purpose: str
    state: Literal["ok", "failed"]
    reason: str | None = None
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float | None = None
    facts: JSON = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class TrainedRow:
    """One recorded answer that a policy was trained on in a group, and what it counted for.

    Attributes:
        call_id: the call that was answered.
        choice: `Choice.index` of the answer.
        trajectory_id: the run that the call is part of.
        group_id: the group that the run was compared in.
        advantage: how much better the run did than its group; 0 moves the policy neither way.
        weight: factor of the answer's loss; 1 unless the update weighs its rows.
    """

    call_id: str
    choice: int
    trajectory_id: str
    group_id: str
    advantage: float
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Policy:
    """Base model + LoRA at one step; immutable; served under its own name.

    Attributes:
        name: `NAME@STEP`.
        base: model directory or hub id of the base.
        base_sha256: fingerprint of the base (`serving.adapters.base_fingerprint`).
        state: where it stands; the table of moves is `promotion.states`.
        created_at: when it was published.
        path: adapter directory; `None` for step 0, which is the base model alone.
        parent: the policy it was trained from.
        metrics: what was measured while it was trained and gated.
    """

    name: str
    base: str
    base_sha256: str
    state: PolicyState
    created_at: float
    path: str | None = None
    parent: str | None = None
    metrics: JSON = field(default_factory=dict[str, Any])

    @property
    def model(self) -> str:
        """`NAME` of `NAME@STEP`."""
        return self.name.rpartition("@")[0]

    @property
    def step(self) -> int:
        """`STEP` of `NAME@STEP`."""
        return int(self.name.rpartition("@")[2])
