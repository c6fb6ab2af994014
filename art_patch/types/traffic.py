"""Records that the store makes from stored calls: traffic of a shadow or canary test, and the numbers of a report."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from art_patch.types.app_records import CallStatus, Mode, Score


class ArmCall(NamedTuple):
    """A call of a shadow or canary test, without texts. Fields that are not listed are those of `Call`.

    Attributes:
        session: id of the run's session; the run's own id if the app names no session.
        group_id: id of the run's group; `None` if the run is in no group.
        at: when the call ended, seconds since the epoch.
        policy: the policy that the call was meant for, even if it failed and upstream answered.
        fell_back: whether upstream answered because the policy failed.
        empty: whether an answer has no token but the stop token, or was cut off at its length limit.
        shadow_of: id of the app's call that this one copies in the background; `None` for the app's calls.
    """

    id: str
    trajectory_id: str
    session: str
    group_id: str | None
    at: float
    policy: str
    status: CallStatus
    fell_back: bool
    duration_ms: float
    ttft_ms: float | None
    empty: bool
    shadow_of: str | None = None


class ArmTraffic(NamedTuple):
    """The calls and scores of the policy under test and of the champion since the test began.

    Attributes:
        calls: calls meant for one of the two policies, in the order in which they ended.
        scores: scores of the runs that these calls are part of.
        share_changes: when the canary's share of the sessions was changed, seconds since the epoch, in order.
    """

    calls: tuple[ArmCall, ...]
    scores: tuple[Score, ...]
    share_changes: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Served:
    """Counts of the app's calls that one policy answered (`None`: upstream). Copies of calls are not counted.

    Attributes:
        failed: number of these calls that ended in an error.
        latencies_ms: durations of the answered calls, in ascending order.
        tokens: prompt tokens and completion tokens by the model that the app asked for.
        unmetered: number of answered calls without token counts.
    """

    policy: str | None
    calls: int = 0
    failed: int = 0
    latencies_ms: tuple[float, ...] = ()
    tokens: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    unmetered: int = 0


@dataclass(frozen=True, slots=True)
class RunValue:
    """The reward and the judge's score of a run in which one policy answered all calls (`None`: upstream).

    Attributes:
        reward: the score from the user or the app's code, on one scale for all runs; `None` without such a score.
        judged: the judge's score, which can be compared only with scores in the same group; `None` if not judged.
        copy: whether the run consists of repeated or copied calls of another run, so that the app never saw it.
    """

    policy: str | None
    reward: float | None = None
    judged: float | None = None
    group_id: str | None = None
    copy: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """The numbers of a period, for `art-patch report`.

    Attributes:
        since: start of the period, seconds since the epoch; `until` is its end.
        champion: the policy that serves when the numbers are read, which may be after the end of the period.
        mode: the mode that the store sets for all apps; `None` if each app uses its own setting.
        served: the calls by policy, most calls first.
        fell_back: number of calls that were meant for a policy and went upstream, by reason.
        runs: the runs that ended in the period and in which one policy, or upstream, answered all calls.
        mixed: number of runs with calls by several policies. Their rewards count for no policy.
        judge_usd: cost of the judge's calls of known price.
        judge_unpriced: number of the judge's calls of unknown price.
        updates: number of policies that were trained in the period.
        update_s: time of all updates, including those that failed, were refused or interrupted. Of an update whose
            process was killed, only the time up to its last checkpoint counts.
        updates_untimed: number of trained policies whose metrics do not say how long the update took.
        updates_lost: number of updates that made no policy.
        engine_s: how long an engine was announced to the apps; `None` if no engine ever was.
    """

    since: float
    until: float
    champion: str | None = None
    mode: Mode | None = None
    served: tuple[Served, ...] = ()
    fell_back: Mapping[str, int] = field(default_factory=dict[str, int])
    runs: tuple[RunValue, ...] = ()
    mixed: int = 0
    judge_usd: float = 0.0
    judge_unpriced: int = 0
    updates: int = 0
    update_s: float = 0.0
    updates_untimed: int = 0
    updates_lost: int = 0
    engine_s: float | None = None
