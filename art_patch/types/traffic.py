"""Records that the store makes from stored calls: traffic of a shadow or canary test, and the numbers of a report."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from art_patch.types.app_records import CallStatus, Mode, Score


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


class ArmTraffic(NamedTuple):
    """The calls and scores of the policy under test and of the champion since the test began."""

    calls: tuple[ArmCall, ...]  # calls meant for one of the two policies, in the order in which they ended
    scores: tuple[Score, ...]  # scores of the runs that these calls are part of
    # When the canary's share of the sessions was changed, seconds since the epoch, in order.
    share_changes: tuple[float, ...] = ()


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
    judge_usd: float = 0.0  # cost of the judge's calls of known price
    judge_unpriced: int = 0  # number of the judge's calls of unknown price
    updates: int = 0  # number of policies that were trained in the period
    # Time of all updates, including those that failed, were refused or interrupted. Of an update whose process was
    # killed, only the time up to its last checkpoint counts.
    update_s: float = 0.0
    updates_untimed: int = 0  # number of trained policies whose metrics do not say how long the update took
    updates_lost: int = 0  # number of updates that made no policy
    engine_s: float | None = None  # how long an engine was announced to the apps; `None` if no engine ever was
