"""Records that the training job makes from stored calls: trajectories, groups, judgements and policies.

The states of a policy and the allowed changes between them (moves) are one table, which the store enforces.

::

    (new) -> candidate -> shadow -> canary -> champion <-> retired -> rejected
                 |           |       |  ^
                 |           |       +--+ another share of the sessions
                 +-----------+-------+--> rejected

The states `shadow` and `canary` may be skipped. At most one policy is champion, and at most one is under test, in
`shadow` or `canary`. Every change is recorded with its author, time and reason.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from art_patch.errors import TransitionError
from art_patch.types.app_records import JSON, PolicyState, Score, SpanInfo, TrajectoryInfo
from art_patch.types.calls import Call


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A trajectory as the job reads it: its calls in the order in which they started, its scores and its spans."""

    info: TrajectoryInfo
    calls: tuple[Call, ...]
    scores: tuple[Score, ...] = ()
    spans: tuple[SpanInfo, ...] = ()

    @property
    def id(self) -> str:
        """The trajectory's id, which is `info.id`."""
        return self.info.id


@dataclass(frozen=True, slots=True)
class Group:
    """Siblings: trajectories of one scenario that are scored in comparison with each other and trained on together."""

    id: str
    scenario_key: str
    # How the siblings were found: `group_key`, `scenario_key`, `sibling_spans`, `same_task`, `near_duplicate` or
    # `resampled`; `single` is one held-out run, which only the gate uses.
    how: str
    trajectories: tuple[Trajectory, ...]
    held_out: bool = False  # whether the scenario is kept for the gate and never trained on
    # Only for `resampled`, whose siblings are new answers to one turn of a run: the messages that came after that turn
    # in the run.
    followed: tuple[JSON, ...] = ()


@dataclass(frozen=True, slots=True)
class Judgement:
    """The record that a judge has scored one group: its cost, and whether it succeeded. Scores are `Score` records."""

    id: str  # unique id; a judgement whose id is in the store already is not written again
    group_id: str
    at: float
    judge: str  # name of the judge's model
    rubric: str  # version of the rubric
    purpose: str  # `score` for training, `gate` for a candidate's test, or another purpose
    state: Literal["ok", "failed"]  # `ok` if every sibling has a score, `failed` if none has
    reason: str | None = None
    calls: int = 0  # number of requests, with retries and requests to repair an answer
    prompt_tokens: int = 0  # as the judge's server counted them, like `completion_tokens`
    completion_tokens: int = 0
    cost_usd: float | None = None  # cost of all requests; `None` if the price of one is unknown
    # Further findings, such as the order of the siblings and the parts that the group was split into.
    facts: JSON = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class TrainedRow:
    """One recorded answer that a policy was trained on as part of a group, with its advantage and weight."""

    call_id: str
    choice: int  # `Choice.index` of the answer
    trajectory_id: str
    group_id: str
    # How much better the run's reward is than its group's; an answer with 0 does not change the policy.
    advantage: float
    weight: float = 1.0  # factor of the answer's loss; 1 unless the update gives its answers different weights


@dataclass(frozen=True, slots=True)
class Policy:
    """A base model with a LoRA adapter after some number of updates. Its weights never change, only its state does."""

    name: str  # `NAME@STEP`, under which it is served; no other policy ever gets this name
    base: str  # model directory or hub id of the base
    base_sha256: str  # fingerprint of the base (`policies.base_fingerprint`)
    state: PolicyState  # `candidate`, `shadow`, `canary`, `champion`, `retired` or `rejected` (`MOVES`)
    created_at: float
    path: str | None = None  # adapter directory; `None` for step 0, which is the base model alone
    parent: str | None = None  # name of the policy that the update started from
    metrics: JSON = field(default_factory=dict[str, Any])  # numbers of its training, its gate and its canary test

    @property
    def model(self) -> str:
        """The part `NAME` of the policy's name `NAME@STEP`, which all policies of an agent share."""
        return self.name.rpartition("@")[0]

    @property
    def step(self) -> int:
        """The part `STEP` of the policy's name `NAME@STEP`: 0 is the base model."""
        return int(self.name.rpartition("@")[2])


MOVES: dict[PolicyState | None, tuple[PolicyState, ...]] = {
    None: ("candidate", "champion"),  # straight to champion only for step 0, the base model
    "candidate": ("shadow", "canary", "champion", "rejected"),
    "shadow": ("canary", "champion", "rejected"),
    "canary": ("canary", "champion", "rejected"),  # to itself: with another share of the sessions
    "champion": ("retired",),
    "retired": ("champion", "rejected"),  # to champion: a rollback
    "rejected": (),
}

CHALLENGERS: tuple[PolicyState, ...] = ("shadow", "canary")  # states of a policy that is tested on the app's traffic


def check_move(policy: str, before: PolicyState | None, after: PolicyState) -> None:
    """Raise `TransitionError`, with the allowed states, if `before` (`None`: it is new) may not become `after`."""
    allowed = MOVES[before]
    if after in allowed:
        return
    if before == after:
        raise TransitionError(f"{policy} is already {after}; nothing to do")
    where = f"is {before}" if before else "is new"
    can = f"it may only become {_either(allowed)}" if allowed else "it stays that way: train a new candidate"
    if before == "champion":
        can += ", which `art-patch rollback` does, or the promotion of another policy"
    raise TransitionError(f"{policy} {where} and cannot become {after}; {can}")


def _either(states: tuple[PolicyState, ...]) -> str:
    *most, last = states
    return f"{', '.join(most)} or {last}" if most else last
