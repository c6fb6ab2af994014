"""Turns calls and scores of the champion and the policy under test into the evidence of the canary test. Pure.

- **Intention to treat.** A call counts for the policy that it was sent to, not for the policy that answered. Otherwise
  a policy under test whose calls fall back to upstream would be credited with upstream's answers.
- **Call by call**: errors, fallbacks, times and empty answers are compared call by call. For a canary, an answer
  without text falls back to upstream, so it counts as a fallback; for a `shadow` it counts as an error. The signal
  `empty` counts answers that are cut off or one token long.
- **Session by session**: feedback, and rewards that the app or its user gave, are compared session by session, because
  each session is assigned to one policy as a whole and its calls are alike. A session with calls of both policies is
  left out, and one with a call that the engine had no room for. That call itself counts for no policy.
- **Within groups**: the judge's scores, and rewards that the project's rule combined of scores, are compared within one
  group, because a rank has no meaning outside of it. A group with runs of both policies is one block; a group with runs
  of one policy is left out. A session counts in one block only: users differ, so the session's second group would count
  the same chance difference again.
- **Changes of the canary's share.** The traffic between two changes is cut into blocks separately, and a session counts
  in the period in which it began. The block that is incomplete at a change is dropped, because the person who changed
  the share may have looked at its values. Complete blocks stay.
- In state `shadow`, the policy under test answers copies of the champion's calls. Each copied call is paired with its
  original, if the champion answered that.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from art_patch import rewards
from art_patch.types import ArmCall, ArmTraffic, Group, Score, Trajectory, TrajectoryInfo

# The breakdown rule looks at this many of the challenger's newest sessions by themselves.
LATEST = 10


class Observation(NamedTuple):
    """One observed value of the champion or of the policy under test (`challenger`)."""

    at: float  # when the value became known, seconds since the epoch; a late score stands where it came
    challenger: bool  # whether the value is the challenger's; else the champion's
    value: float  # from 0 to 1, or a time in milliseconds


class Block(NamedTuple):
    """Values of the champion and the policy under test from the same time, at least one of each: the test's unit."""

    at: float  # when the last value became known
    challenger: tuple[float, ...]
    champion: tuple[float, ...]


def blocks(observations: Iterable[Observation]) -> list[Block]:
    """Cut observations into the shortest blocks that hold values of both policies; drop an incomplete last block."""
    found: list[Block] = []
    ours: list[float] = []
    theirs: list[float] = []
    for each in sorted(observations, key=lambda one: one.at):
        (ours if each.challenger else theirs).append(each.value)
        # The end of a block depends on who was asked, never on a value. So the mean of a block's difference is the
        # difference of the arms, whatever share of the sessions each of them has, and a bad hour weighs on both.
        if ours and theirs:
            found.append(Block(each.at, tuple(ours), tuple(theirs)))
            ours, theirs = [], []
    return found


@dataclass(frozen=True, slots=True)
class Arm:
    """Counts of the calls and sessions of one policy, champion or policy under test, since the test began.

    A session counts once, and as failed if its newest call failed or fell back to upstream. Its calls are alike, and a
    client without an answer retries, so the breakdown rule counts sessions; a majority of their calls would show it
    late.
    """

    calls: int = 0
    sessions: int = 0
    failed: int = 0  # calls that failed or that upstream had to answer
    failed_sessions: int = 0
    # Failed sessions among the newest: the challenger's newest `LATEST`, and the champion's since the oldest of those,
    # or its own newest `LATEST` if these are more.
    failed_latest: int = 0
    # How many sessions `failed_latest` was counted in; `None` for `LATEST`, or all if there are fewer.
    latest: int | None = None

    @property
    def of_latest(self) -> int:
        """Number of newest sessions that `failed_latest` refers to."""
        return min(self.sessions, LATEST) if self.latest is None else self.latest


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that was observed of the champion and of the policy under test (`challenger`) since the test began."""

    challenger: Arm = Arm()
    champion: Arm = Arm()
    # Name of the signal -> its blocks, in order of time.
    blocks: Mapping[str, Sequence[Block]] = field(default_factory=dict[str, Sequence[Block]])


_Value = Callable[[ArmCall], float | None]


def _answered(value: _Value) -> _Value:
    """Restrict a value to calls that the asked policy answered itself."""
    return lambda call: value(call) if call.status == "ok" and not call.fell_back else None


# Name of the signal -> its value in one call; `None` if the call says nothing about it.
BY_CALL: Mapping[str, _Value] = {
    "errors": lambda call: float(call.status == "error" and not call.fell_back),
    "fallbacks": lambda call: float(call.fell_back),
    "empty": _answered(lambda call: float(call.empty)),
    "latency_ms": _answered(lambda call: call.duration_ms),
    "ttft_ms": _answered(lambda call: call.ttft_ms),
}


def evidence_of(traffic: ArmTraffic, *, challenger: str, champion: str, state: Literal["shadow", "canary"]) -> Evidence:
    """Turn the calls and scores of a test's traffic into evidence for or against the policy under test.

    Args:
        traffic: calls and scores since the policy under test (`challenger`) got its state; for a `shadow`, its copied
            calls and their originals. Calls of further policies are ignored.
        state: for a `shadow`, copies are paired with their originals; for a `canary`, the traffic is cut into blocks.
    """
    calls = [call for call in traffic.calls if call.policy in (challenger, champion)]
    sides = [[call for call in calls if call.policy == name] for name in (challenger, champion)]
    if state == "shadow":
        return Evidence(*_arms(*sides), _pairs(*sides))
    found: dict[str, list[Block]] = defaultdict(list)
    # In these sessions upstream answered a part, because the engine was full: not what a policy is compared by.
    began_before = {call.session for call in traffic.calls if not call.policy}
    for stretch in _by_share(calls, traffic.share_changes):
        runs = _runs((call for call in stretch if call.session not in began_before), traffic.scores)
        its = {"reward": _rewards(runs, challenger), "feedback": _feedback(runs, challenger)}
        for name, parts in (_by_call(stretch, challenger) | its).items():
            found[name] += parts
        began_before |= {call.session for call in stretch}
    in_order = {name: sorted(its, key=lambda block: block.at) for name, its in found.items()}
    return Evidence(*_arms(*sides), in_order)


def _by_share(calls: Iterable[ArmCall], changes: Sequence[float]) -> list[list[ArmCall]]:
    found: list[list[ArmCall]] = [[] for _ in range(len(changes) + 1)]
    for call in calls:
        found[sum(change <= call.at for change in changes)].append(call)
    return found


def _arms(ours: Sequence[ArmCall], theirs: Sequence[ArmCall]) -> tuple[Arm, Arm]:
    """Count both arms, and their newest sessions over the same time."""
    newest = _newest(ours)
    # A canary with a twentieth of the sessions reaches back twenty times as far with its newest ten. The champion's
    # newest ten would already have forgotten an outage that still counts against the canary.
    since = newest[-LATEST].at if len(newest) >= LATEST else float("-inf")
    return _arm(ours, newest, since), _arm(theirs, _newest(theirs), since)


def _arm(calls: Sequence[ArmCall], newest: Sequence[ArmCall], since: float) -> Arm:
    latest = [call for call in newest if call.at >= since]
    if len(latest) < LATEST:
        latest = newest[-LATEST:]
    counts = len(calls), len(newest), *(sum(map(_failed, some)) for some in (calls, newest, latest))
    return Arm(*counts, latest=len(latest))


def _newest(calls: Sequence[ArmCall]) -> list[ArmCall]:
    """Return the newest call of each session, oldest first."""
    of_session: dict[str, ArmCall] = {}
    for call in reversed(calls):
        of_session.setdefault(call.session, call)
    return list(of_session.values())[::-1]


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
    both = [(copy, theirs[copy.shadow_of]) for copy in copies if copy.shadow_of in theirs]
    return {
        name: [
            Block(copy.at, (ours,), (other,))
            for copy, original in both
            if (ours := value(copy)) is not None and (other := value(original)) is not None
        ]
        for name, value in BY_CALL.items()
        if name != "ttft_ms"  # copies are not streamed
    }


class _Run(NamedTuple):
    policy: str
    session: str
    group_id: str | None
    scores: tuple[Score, ...]

    def as_trajectory(self) -> Trajectory:
        return Trajectory(TrajectoryInfo(self.session, 0.0), (), self.scores)


# Values of runs: whose, when it became known, and which.
_Known = list[tuple[_Run, float, float]]


def _runs(calls: Iterable[ArmCall], scores: Iterable[Score]) -> list[_Run]:
    """Return the scored runs of sessions in which only one of the two policies was asked."""
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
        own = rewards.newest(trajectory, rewards.REWARD_NAME, rewards.REWARD_SOURCES)
        in_group = [(rewards.REWARD_NAME, rewards.COMBINED), (rewards.SCORE_NAME, rewards.SCORE_SOURCE)]
        combined, ranked = (
            None if group is None else rewards.newest(trajectory, name, (source,), group_id=group)
            for name, source in in_group
        )
        # A project's combined reward wins, then a reward of the app or its user, then the judge's rank.
        if combined is None and own is not None:
            alone.append((run, _known_at(run, rewards.REWARD_NAME), own))
        elif group is not None and (value := ranked if combined is None else combined) is not None:
            name = rewards.SCORE_NAME if combined is None else rewards.REWARD_NAME
            judged[group].append((run, _known_at(run, name), value))
    return _by_session(alone, challenger) + _by_group(judged.values(), challenger)


def _by_group(groups: Iterable[_Known], challenger: str) -> list[Block]:
    found: list[Block] = []
    heard: set[str] = set()
    # In order of time, so that whether a session was counted before does not depend on what comes later.
    for members in sorted(groups, key=_last_known):
        sessions = {key: its for key, its in _sessions(members).items() if key not in heard}
        ours = tuple(_mean(its) for its in sessions.values() if its[0][0].policy == challenger)
        theirs = tuple(_mean(its) for its in sessions.values() if its[0][0].policy != challenger)
        if ours and theirs:
            found.append(Block(_last_known(members), ours, theirs))
            heard |= sessions.keys()
    return found


def _feedback(runs: Sequence[_Run], challenger: str) -> list[Block]:
    content = rewards.satisfaction_G(Group("", "", "single", tuple(run.as_trajectory() for run in runs)))
    said = [
        (run, max(_known_at(run, name) for name in rewards.PEOPLE), value)
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
