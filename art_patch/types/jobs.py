"""Records made from stored calls: trajectories, groups and policies for the job, and the traffic of a test or a period.

The states of a policy and the allowed changes between them (moves) are one table, which the store enforces.

::

    (new) -> candidate -> shadow -> canary -> champion <-> retired -> rejected
                 |           |       |  ^                     |
                 |           |       +--+ another share       +--> shadow or canary: tested once more,
                 +-----------+-------+--> rejected                 and retired again if it does not win

Beside upstream (the provider answers, and there is no champion)::

    (new) -> candidate -> learner <-> canary -> champion
                             ^                     |
                             +---------------------+ proven worse than upstream

The states `shadow` and `canary` may be skipped. At most one policy is champion, at most one is learner, and at most one
is under test, in `shadow` or `canary`. Every change is recorded with its author, time and reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from art_patch.errors import TransitionError
from art_patch.types.app_records import JSON, CallStatus, Mode, PolicyState, Score, SpanInfo, TrajectoryInfo
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
    # How the siblings were found: `group_key`, `scenario_key`, `sibling_spans`, `same_task`, `near_duplicate`,
    # `resampled` or `branched`; `single` is one held-out run, which only the gate uses.
    how: str
    trajectories: tuple[Trajectory, ...]
    held_out: bool = False  # whether the scenario is kept for the gate and never trained on
    # Only for `resampled`, whose siblings are new answers to one turn of a run: the messages that came after that turn
    # in the run.
    followed: tuple[JSON, ...] = ()


@dataclass(frozen=True, slots=True)
class KnownScenario:
    """The scenario that a wording of a task belongs to since it was first seen, and whether that is held out."""

    scenario_key: str
    held_out: bool
    first_seen_at: float  # seconds since the epoch


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


CONTINUABLE = "may_be_continued"
"""Name in the gate's metrics of a rejected candidate that the next update may start from."""


IMPORTED = "imported"
"""Name in a policy's metrics of what it brought along when it was imported: its origin, and its tests elsewhere."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A base model with a LoRA adapter after some number of updates. Its weights never change, only its state does."""

    name: str  # `NAME@STEP`, under which it is served; no other policy ever gets this name
    base: str  # model directory or hub id of the base
    base_sha256: str  # fingerprint of the base (`policies.base_fingerprint`)
    state: PolicyState  # `candidate`, `learner`, `shadow`, `canary`, `champion`, `retired` or `rejected` (`MOVES`)
    created_at: float
    path: str | None = None  # adapter directory; `None` for step 0, which is the base model alone
    parent: str | None = None  # name of the policy that the update started from
    metrics: JSON = field(default_factory=dict[str, Any])  # numbers of its training, its gate and its canary test

    @property
    def model(self) -> str:
        """The part `NAME` of the policy's name `NAME@STEP`, which all policies of an agent share."""
        return self.name.rpartition("@")[0]

    @property
    def may_be_continued(self) -> bool:
        """Whether its gate rejected it only for lack of proof, so that the next update may start from it."""
        return self.state == "rejected" and bool(self.metrics.get("gate", {}).get(CONTINUABLE))

    @property
    def step(self) -> int:
        """The part `STEP` of the policy's name `NAME@STEP`: 0 is the base model."""
        return int(self.name.rpartition("@")[2])


MOVES: dict[PolicyState | None, tuple[PolicyState, ...]] = {
    None: ("candidate", "champion"),  # straight to champion only for step 0, the base model
    "candidate": ("learner", "shadow", "canary", "champion", "rejected"),
    "learner": ("canary", "champion", "retired", "rejected"),
    "shadow": ("canary", "champion", "retired", "rejected"),  # to retired: it was retired before the test
    # To itself: with another share of the sessions. To learner: upstream goes on to answer all.
    "canary": ("canary", "learner", "champion", "retired", "rejected"),
    "champion": ("retired", "learner"),  # to learner: upstream answers again
    "retired": ("champion", "learner", "shadow", "canary", "rejected"),  # to champion: a rollback
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


class ArmCall(NamedTuple):
    """A call of a shadow or canary test, without texts. Fields without a comment are those of `Call`."""

    id: str
    trajectory_id: str
    session: str  # id of the run's session; the run's own id if the app names no session
    group_id: str | None  # id of the run's group; `None` if the run is in no group
    at: float  # when the call ended, seconds since the epoch
    policy: str  # the policy that the call was meant for, even if it failed and upstream answered
    status: CallStatus
    fell_back: bool  # whether upstream answered because the policy failed
    duration_ms: float
    ttft_ms: float | None
    empty: bool  # whether an answer has no token but the stop token, or was cut off at its length limit
    # Id of the app's call that this one copies in the background; `None` for the app's calls.
    shadow_of: str | None = None
    down: bool = False  # whether the engine could not be reached, for whichever policy


UPSTREAM_ARM = "upstream"
"""`ArmCall.policy` of the control group's calls."""


class ArmTraffic(NamedTuple):
    """The calls and scores of the policy under test and of the champion since the test began.

    Of a control group these are the champion in the place of the policy under test, and upstream in the champion's.
    """

    calls: tuple[ArmCall, ...]  # calls meant for one of the two policies, in the order in which they ended
    scores: tuple[Score, ...]  # scores of the runs that these calls are part of
    # When the canary got which share of the sessions (seconds since the epoch, percent), the first one first. Of a
    # control group: which share the champion has of its own sessions and the control group's, from the first call on.
    shares: tuple[tuple[float, float], ...] = ()
    is_whole: bool = True  # whether these are all calls of the test: no more than the store reads were made


class UpstreamChange(NamedTuple):
    """A model of upstream's that another one has replaced under the name that the app asks for."""

    requested_model: str  # the name that the app asks for, which may be an alias
    before: str  # the model that answered, as in `Call.answered_by`; the one that came last before `after`
    after: str
    at: float  # when `after` first answered


@dataclass(frozen=True, slots=True)
class Served:
    """Counts of the app's calls that one policy answered (`None`: upstream). Copies of calls are not counted."""

    policy: str | None
    calls: int = 0
    failed: int = 0  # number of these calls that ended in an error
    latencies_ms: tuple[float, ...] = ()  # durations of the answered calls, in ascending order
    # Prompt tokens and completion tokens by the model that the app asked for.
    tokens: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    unmetered: int = 0  # number of answered calls without token counts


@dataclass(frozen=True, slots=True)
class RunValue:
    """The reward and the judge's score of a run in which one policy answered all calls (`None`: upstream)."""

    policy: str | None
    # The score from the user or the app's code, on one scale for all runs; `None` without such a score.
    reward: float | None = None
    # The judge's score, which can be compared only with scores in the same group; `None` if not judged.
    judged: float | None = None
    group_id: str | None = None
    # Whether the run consists of repeated or copied calls of another run, so that the app never saw it.
    copy: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """The numbers of a period, for `art-patch report`."""

    since: float  # start of the period, seconds since the epoch; `until` is its end
    until: float
    # The policy that serves when the numbers are read, which may be after the end of the period.
    champion: str | None = None
    mode: Mode | None = None  # the mode that the store sets for all apps; `None` if each app uses its own setting
    served: tuple[Served, ...] = ()  # the calls by policy, most calls first
    # Number of calls that were meant for a policy and went upstream, by reason.
    fell_back: Mapping[str, int] = field(default_factory=dict[str, int])
    # The runs that ended in the period and in which one policy, or upstream, answered all calls.
    runs: tuple[RunValue, ...] = ()
    mixed: int = 0  # number of runs with calls by several policies. Their rewards count for no policy
    # A model of upstream's that was replaced within the period. Its calls and runs are no evidence about today's one.
    upstream_change: UpstreamChange | None = None
    upstream_now: Served | None = None  # upstream's calls since then; `None` if no model was replaced
    outdated: int = 0  # number of upstream's runs that began before; they are not among `runs`
    judge_usd: float = 0.0  # cost of the judge's calls of known price
    judge_unpriced: int = 0  # number of the judge's calls of unknown price
    updates: int = 0  # number of policies that were trained in the period
    # Time of all updates, including those that failed, were refused or interrupted. Of an update whose process was
    # killed, only the time up to its last checkpoint counts.
    update_s: float = 0.0
    updates_untimed: int = 0  # number of trained policies whose metrics do not say how long the update took
    updates_lost: int = 0  # number of updates that made no policy
    engine_s: float | None = None  # how long an engine was announced to the apps; `None` if no engine ever was
    erased: int = 0  # number of runs that were erased since the period began: they count nowhere any more
