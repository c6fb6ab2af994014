"""Calls and scores of two policies -> what a challenger is judged by. Pure.

Which policy a call counts for is decided by who was asked, not by who answered: a challenger that leaves its sessions
to upstream must not shine with upstream's answers. Errors, fallbacks, times and empty answers are compared call by
call. An answer without a word falls back, so it counts among the fallbacks, and among the errors in state `shadow`;
`empty` counts answers that are cut off or a single token long. Rewards and feedback are compared session by session,
because a session never changes sides; a session of both policies is left out.

A reward that the app or its user gave stands for itself. A judge's ranks mean something within one group only, so they
are compared within groups that hold runs of both policies, a group being a block; a group of one policy's runs alone
says nothing of either. A session counts in one of these blocks: who asks makes some sessions score better than others
in every group, and a session never changes sides, so its second group would say the same luck again.

Where the canary's share was changed, what was seen under each share is compared by itself, and a session counts under
the share that it began with. The block that was open at the change is dropped, because who changes the share may have
looked at it; all that was closed before stands, whatever the share was (`sequential`).

In state `shadow` every copy is compared with the very call that it copies, if the champion answered that one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Literal, NamedTuple

from art_patch.promotion.sequential import Block, Observation, blocks
from art_patch.promotion.watching import LATEST, Arm, Evidence
from art_patch.rewards import (
    COMBINED,
    PEOPLE,
    REWARD_NAME,
    REWARD_SOURCES,
    SCORE_NAME,
    SCORE_SOURCE,
    newest,
    satisfaction_G,
)
from art_patch.types import ArmCall, ArmTraffic, Group, Score, Trajectory, TrajectoryInfo

_Value = Callable[[ArmCall], float | None]


def _answered(value: _Value) -> _Value:
    """What only an answer of the policy's own can tell."""
    return lambda call: value(call) if call.status == "ok" and not call.fell_back else None


BY_CALL: Mapping[str, _Value] = {
    "errors": lambda call: float(call.status == "error" and not call.fell_back),
    "fallbacks": lambda call: float(call.fell_back),
    "empty": _answered(lambda call: float(call.empty)),
    "latency_ms": _answered(lambda call: call.duration_ms),
    "ttft_ms": _answered(lambda call: call.ttft_ms),
}
"""Signals that every call tells something of; `None` is nothing."""


def evidence_of(traffic: ArmTraffic, *, challenger: str, champion: str, state: Literal["shadow", "canary"]) -> Evidence:
    """Return what the challenger is to be judged by.

    Args:
        traffic: since it came into its state; in `shadow`, its copies and the calls that they copy.
        challenger: its name.
        champion: the policy that it is compared with; calls of others are passed over.
        state: how the two are paired.
    """
    calls = [call for call in traffic.calls if call.policy in (challenger, champion)]
    sides = [[call for call in calls if call.policy == name] for name in (challenger, champion)]
    if state == "shadow":
        return Evidence(*_arms(*sides), _pairs(*sides))
    found: dict[str, list[Block]] = defaultdict(list)
    began_before: set[str] = set()
    for stretch in _by_share(calls, traffic.share_changes):
        runs = _runs((call for call in stretch if call.session not in began_before), traffic.scores)
        its = {"reward": _rewards(runs, challenger), "feedback": _feedback(runs, challenger)}
        for name, parts in (_by_call(stretch, challenger) | its).items():
            found[name] += parts
        began_before |= {call.session for call in stretch}
    in_order = {name: sorted(its, key=attrgetter("at")) for name, its in found.items()}
    return Evidence(*_arms(*sides), in_order)


def _by_share(calls: Iterable[ArmCall], changes: Sequence[float]) -> list[list[ArmCall]]:
    """The calls before the first change of the canary's share, those until the second, and so on."""
    found: list[list[ArmCall]] = [[] for _ in range(len(changes) + 1)]
    for call in calls:
        found[bisect_right(changes, call.at)].append(call)
    return found


def _arms(ours: Sequence[ArmCall], theirs: Sequence[ArmCall]) -> tuple[Arm, Arm]:
    """Counts of the challenger and of the champion; the newest sessions of both are those of one time.

    With a twentieth of the sessions the challenger's newest ten reach back twenty times as far as the champion's: an
    outage would weigh on the challenger long after the champion's newest ten have forgotten it.
    """
    newest = _newest(ours)
    since = newest[-LATEST].at if len(newest) >= LATEST else float("-inf")
    return _arm(ours, newest, since), _arm(theirs, _newest(theirs), since)


def _arm(calls: Sequence[ArmCall], newest: Sequence[ArmCall], since: float) -> Arm:
    latest = [call for call in newest if call.at >= since]
    if len(latest) < LATEST:
        latest = newest[-LATEST:]
    counts = len(calls), len(newest), *(sum(map(_failed, some)) for some in (calls, newest, latest))
    return Arm(*counts, latest=len(latest))


def _newest(calls: Iterable[ArmCall]) -> list[ArmCall]:
    """The newest call of each session, oldest first."""
    of_session: dict[str, ArmCall] = {}
    for call in calls:
        of_session.pop(call.session, None)
        of_session[call.session] = call
    return list(of_session.values())


def _failed(call: ArmCall) -> bool:
    return call.fell_back or call.status == "error"


def _by_call(calls: Sequence[ArmCall], challenger: str) -> dict[str, list[Block]]:
    return {
        name: blocks(
            Observation(call.at, call.policy == challenger, known)
            for call in calls
            if (known := value(call)) is not None
        )
        for name, value in BY_CALL.items()
    }


def _pairs(copies: Sequence[ArmCall], originals: Sequence[ArmCall]) -> dict[str, Sequence[Block]]:
    theirs = {call.id: call for call in originals}
    found: dict[str, list[Block]] = {name: [] for name in BY_CALL if name != "ttft_ms"}  # copies are not streamed
    for copy in copies:
        original = theirs.get(copy.shadow_of or "")
        for name, pairs in found.items():
            ours = BY_CALL[name](copy)
            other = None if original is None else BY_CALL[name](original)
            if ours is not None and other is not None:
                pairs.append(Block(copy.at, (ours,), (other,)))
    return {**found}


class _Run(NamedTuple):
    policy: str
    session: str
    group_id: str | None
    scores: tuple[Score, ...]

    def as_trajectory(self) -> Trajectory:
        return Trajectory(TrajectoryInfo(self.session, 0.0), (), self.scores)


_Known = list[tuple[_Run, float, float]]
"""Values of runs: whose, when it became known, and which."""


def _runs(calls: Iterable[ArmCall], scores: Iterable[Score]) -> list[_Run]:
    """The scored runs of sessions that only one of the two policies was asked in."""
    sides: dict[str, set[str]] = defaultdict(set)
    first: dict[str, ArmCall] = {}
    for call in calls:
        sides[call.session].add(call.policy)
        first.setdefault(call.trajectory_id, call)
    given: dict[str, list[Score]] = defaultdict(list)
    for score in scores:
        given[score.trajectory_id].append(score)
    return [
        _Run(call.policy, call.session, call.group_id, tuple(given[key]))
        for key, call in first.items()
        if len(sides[call.session]) == 1 and key in given
    ]


def _rewards(runs: Iterable[_Run], challenger: str) -> list[Block]:
    alone: _Known = []
    judged: dict[str, _Known] = defaultdict(list)
    for run in runs:
        trajectory, group = run.as_trajectory(), run.group_id
        combined = None if group is None else newest(trajectory, REWARD_NAME, (COMBINED,), group_id=group)
        own = newest(trajectory, REWARD_NAME, REWARD_SOURCES)
        ranked = None if group is None else newest(trajectory, SCORE_NAME, (SCORE_SOURCE,), group_id=group)
        if combined is None and own is not None:
            alone.append((run, _known_at(run, REWARD_NAME), own))
        elif group is not None and (value := ranked if combined is None else combined) is not None:
            judged[group].append((run, _known_at(run, SCORE_NAME if combined is None else REWARD_NAME), value))
    return _by_session(alone, challenger) + _by_group(judged.values(), challenger)


def _by_group(groups: Iterable[_Known], challenger: str) -> list[Block]:
    found: list[Block] = []
    heard: set[str] = set()
    for members in sorted(groups, key=_last_known):
        sessions = {key: its for key, its in _sessions(members).items() if key not in heard}
        ours = tuple(_mean(its) for its in sessions.values() if its[0][0].policy == challenger)
        theirs = tuple(_mean(its) for its in sessions.values() if its[0][0].policy != challenger)
        if ours and theirs:
            found.append(Block(_last_known(members), ours, theirs))
            heard |= sessions.keys()
    return found


def _feedback(runs: Sequence[_Run], challenger: str) -> list[Block]:
    content = satisfaction_G(Group("", "", "single", tuple(run.as_trajectory() for run in runs)))
    said = [
        (run, max(_known_at(run, name) for name in PEOPLE), value)
        for run, value in zip(runs, content, strict=True)
        if value is not None
    ]
    return _by_session(said, challenger)


def _by_session(values: Iterable[tuple[_Run, float, float]], challenger: str) -> list[Block]:
    return blocks(
        Observation(_last_known(members), members[0][0].policy == challenger, _mean(members))
        for members in _sessions(values).values()
    )


def _sessions(values: Iterable[tuple[_Run, float, float]]) -> dict[str, _Known]:
    found: dict[str, _Known] = defaultdict(list)
    for one in values:
        found[one[0].session].append(one)
    return found


def _last_known(values: _Known) -> float:
    return max(at for _, at, _ in values)


def _mean(values: _Known) -> float:
    return sum(value for _, _, value in values) / len(values)


def _known_at(run: _Run, name: str) -> float:
    return max((score.at for score in run.scores if score.name == name), default=0.0)
