"""What the store tells of a challenger and its champion: calls without their words, and scores."""

from __future__ import annotations

from typing import NamedTuple

from art_patch.types.app_records import CallStatus, Score


class ArmCall(NamedTuple):
    """One call that was meant for a policy, as far as policies are compared by it.

    Attributes:
        id: of the call.
        trajectory_id: the run that it is part of.
        session: the run's session, or the run itself where the app names none.
        group_id: the run's group, if it has siblings.
        at: when it ended.
        policy: that was asked, whether it answered or not.
        status: as in `Call`.
        fell_back: upstream answered, because the policy did not.
        duration_ms: as in `Call`.
        ttft_ms: as in `Call`.
        empty: an answer has no tokens but its end, or was cut off at its length limit.
        shadow_of: id of the call that this one copies without the app seeing it.
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
    """The calls and scores of both policies while a challenger is tested.

    Attributes:
        calls: of both policies, in the order in which they ended.
        scores: of the runs that these calls are part of.
        share_changes: when the share of the sessions that a canary answers was changed, seconds since the epoch, in
            order.
    """

    calls: tuple[ArmCall, ...]
    scores: tuple[Score, ...]
    share_changes: tuple[float, ...] = ()
