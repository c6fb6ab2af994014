"""Turns calls and scores of the champion and the policy under test into one value a session and signal. Pure.

- **A session** is a `session_id`, else the trajectory. It belongs to the policy that its first call was meant for,
  whoever answered later: sessions were assigned by chance, calls were not. It ends when it has made no call for
  `rest_s`, at the latest after `LONGEST_S`. Then its values are made, and never again. A failed call makes it a failed
  session at once.
- **A failure** is a call that failed, or that upstream answered because the policy was slow, refused it or gave no
  valid answer. Upstream's answer is not the policy's: a run with such a call has the reward 0, if it has one.
- **A reward or feedback that comes late** counts when the first of a session's comes, up to `LATE_S` after the begin;
  those after the first change nothing. A session that has none `silence_s` after its end is silent.
- **The judge's scores** of sessions that have no reward of their own yet, and rewards that the project's rule combined
  of scores, are compared within one group, because a rank has no meaning outside of it: the guess of one session's
  score is the mean of the others in its group. A session counts in one group only: users differ, so its second group
  would count the same chance again.
- **Left out, of both policies alike**: sessions that overlap a time in which the engine could not be reached, which
  lasts until a policy answers again, or in which it had no room for one of their calls; and sessions that began within
  `SETTLE_S` after the share changed, because apps follow it at different moments.
- In state `shadow`, the policy under test answers copies of the champion's calls. A session's copies are compared with
  their originals, up to its first rest.

What is compared, and in which order, depends on the sessions alone and never on whose they are.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal, NamedTuple

from art_patch import rewards
from art_patch.types import UPSTREAM_ARM, ArmCall, ArmTraffic, Group, Score, Trajectory, TrajectoryInfo

REST_S = 60.0
LONGEST_S = 3_600.0
LATE_S = 86_400.0
SILENCE_S = 3_600.0
SETTLE_S = 5.0

# Sessions within so long of a call that found no engine are left out, too.
_DOWN_S = 30.0


class Observation(NamedTuple):
    """The value of one session, of the champion or of the policy under test (`challenger`)."""

    at: float  # when it was known, seconds since the epoch
    challenger: bool  # whether the session was assigned to the policy under test
    value: float  # from 0 to 1, or a time in milliseconds
    share: float = 1.0  # the probability with which sessions were assigned to the policy under test then
    guess: float | None = None  # of the value, from others of its group; `None`: from all values before
    champions: float | None = None  # the champion's value, if both answered the same calls
    # When it joins the values before, if later. A failure is known at once and a success when the session has ended, so
    # for a while only failures would be known, and a failure would be no surprise.
    joins: float | None = None

    def turned(self) -> "Observation":
        """Return the observation with 0 and 1 exchanged."""
        champions = None if self.champions is None else 1 - self.champions
        return self._replace(value=1 - self.value, champions=champions)


@dataclass(frozen=True, slots=True)
class Arm:
    """Counts of one policy, champion or policy under test, since the test began."""

    calls: int = 0
    sessions: int = 0  # that have begun, those that are left out included
    failed: int = 0  # calls that failed or that upstream had to answer


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that was observed of the champion and of the policy under test (`challenger`) since the test began."""

    challenger: Arm = Arm()
    champion: Arm = Arm()
    # Name of the signal -> its observations, in the order in which they were known.
    observations: Mapping[str, Sequence[Observation]] = field(default_factory=dict[str, Sequence[Observation]])
    # Name of the signal -> whether each session had a value (1 or 0) `silence_s` after its end, ...
    heard: Mapping[str, Sequence[Observation]] = field(default_factory=dict[str, Sequence[Observation]])
    # ... and that value, which is 0 for silence: users who are not content may leave and say nothing.
    with_silence: Mapping[str, Sequence[Observation]] = field(default_factory=dict[str, Sequence[Observation]])
    # The canary's shares of the sessions so far, in percent, the present one last.
    percents: Sequence[float] = ()
    is_whole: bool = True  # whether all calls of the test were read

    def sessions_a_day(self, hours: float) -> float:
        """The number of sessions of both policies in 24 hours of this test."""
        return 24 * (self.challenger.sessions + self.champion.sessions) / hours if hours > 0 else 0.0


class _Session(NamedTuple):
    key: str
    challenger: bool
    share: float
    began: float
    ended: float  # when its values are made
    calls: tuple[ArmCall, ...]

    @property
    def runs(self) -> frozenset[str]:
        return frozenset(call.trajectory_id for call in self.calls)

    def saw(self, at: float, value: float, guess: float | None = None) -> Observation:
        return Observation(at, self.challenger, value, self.share, guess)


def failed(call: ArmCall) -> bool:
    """Whether the policy that the call was meant for gave no answer."""
    return call.fell_back or call.status == "error"


def _answered(call: ArmCall) -> bool:
    return call.status == "ok" and not call.fell_back


_Value = Callable[[Sequence[ArmCall]], float | None]


def _mean_of(value: Callable[[ArmCall], float | None]) -> _Value:
    """Return the mean over the calls that the policy answered itself, and that have this value."""

    def mean(calls: Sequence[ArmCall]) -> float | None:
        known = [one for call in calls if _answered(call) and (one := value(call)) is not None]
        return fmean(known) if known else None

    return mean


def _geometric(value: Callable[[ArmCall], float | None]) -> _Value:
    # One call of a minute among many of a second must not decide alone.
    log = _mean_of(lambda call: None if (one := value(call)) is None else math.log(max(one, 0.001)))
    return lambda calls: None if (mean := log(calls)) is None else math.exp(mean)


# Name of the signal -> its value in the calls of a session; `None` if they say nothing about it.
BY_CALL: Mapping[str, _Value] = {
    "failed": lambda calls: float(any(map(failed, calls))),
    "empty": _mean_of(lambda call: float(call.empty)),
    "latency_ms": _geometric(lambda call: call.duration_ms),
    "ttft_ms": _geometric(lambda call: call.ttft_ms),
}


def evidence_of(
    traffic: ArmTraffic, *, challenger: str, champion: str, state: Literal["shadow", "canary"], now: float,
    rest_s: float = REST_S, silence_s: float = SILENCE_S,
) -> Evidence:  # fmt: skip
    """Turn the calls and scores of a test's traffic into evidence for or against the policy under test.

    Args:
        traffic: calls and scores since the policy under test (`challenger`) got its state; for a `shadow`, its copied
            calls and their originals. Calls of further policies are ignored.
        now: sessions that have not ended by then (seconds since the epoch) have no value yet.
        rest_s: seconds without a call after which a session has ended.
        silence_s: seconds after its end when a session without a reward or feedback is silent.
    """
    ours, theirs = ([call for call in traffic.calls if call.policy == name] for name in (challenger, champion))
    if state == "shadow":
        own, other = (_arm(calls, {call.session for call in calls}) for calls in (ours, theirs))
        return Evidence(own, other, _pairs(ours, theirs, now, rest_s), is_whole=traffic.is_whole)
    begun = _sessions(traffic, challenger, champion, rest_s)
    sessions = _comparable(begun, traffic)
    found = {name: _by_call(name, value, sessions, now) for name, value in BY_CALL.items()}
    heard, with_silence = dict[str, list[Observation]](), dict[str, list[Observation]]()
    given_by_app = [one for one in traffic.scores if one.source in rewards.REWARD_SOURCES]
    own = _scores(one for one in given_by_app if one.name == rewards.REWARD_NAME)
    said = _scores(one for one in given_by_app if one.name in rewards.PEOPLE)
    judged, by_judge = _judged(sessions, _scores(traffic.scores), own, now)
    for name, value, given in (("reward", _own_reward, own), ("feedback", _feedback, said)):
        firsts = [(each, _first(each, value, given, now)) for each in sessions]
        is_judged = by_judge if name == "reward" else ()
        found[name] = [one for each, one in firsts if one is not None and each.key not in is_judged]
        # What is known first is the same at each later look, so it was known by then or it was not.
        at_last = [(each, one, at) for each, one in firsts if (at := each.ended + silence_s) <= now]
        known = [(each, one.value if one is not None and one.at <= at else None, at) for each, one, at in at_last]
        heard[name] = [each.saw(at, float(value is not None)) for each, value, at in known]
        with_silence[name] = [each.saw(at, value or 0.0) for each, value, at in known]
    if judged:
        del heard["reward"], with_silence["reward"]  # whom the judge compares, it chooses itself
        found["reward"] += judged
    own, other = (
        _arm(calls, [each for each in begun if each.challenger is which])
        for calls, which in ((ours, True), (theirs, False))
    )
    found, heard, with_silence = (
        {name: _in_order(its) for name, its in each.items()} for each in (found, heard, with_silence)
    )
    percents = [percent for _, percent in traffic.shares]
    return Evidence(own, other, found, heard, with_silence, percents, traffic.is_whole)


def _arm(calls: Sequence[ArmCall], sessions: Collection[object]) -> Arm:
    return Arm(len(calls), len(sessions), sum(map(failed, calls)))


def _in_order(observations: Iterable[Observation]) -> list[Observation]:
    return sorted(observations, key=lambda one: one.at)


def _began(call: ArmCall) -> float:
    return call.at - call.duration_ms / 1000


def _sessions(traffic: ArmTraffic, challenger: str, champion: str, rest_s: float) -> list[_Session]:
    """Return the sessions whose first call was meant for one of the two policies, each up to its first rest."""
    calls: dict[str, list[ArmCall]] = defaultdict(list)
    for call in traffic.calls:
        calls[call.session].append(call)
    times = [at for at, _ in traffic.shares]
    found: list[_Session] = []
    for key, its in calls.items():
        its.sort(key=_began)
        first, until = its[0], its[0].at
        if first.policy not in (challenger, champion):
            continue
        began, kept = _began(first), [first]
        for call in its[1:]:
            if _began(call) > min(until + rest_s, began + LONGEST_S):
                break
            kept.append(call)
            until = max(until, call.at)
        place = bisect_right(times, began) - 1
        share = traffic.shares[place][1] / 100 if place >= 0 else 0.0
        ended = min(until, began + LONGEST_S) + rest_s
        found.append(_Session(key, first.policy == challenger, share, began, ended, tuple(kept)))
    return found


def _comparable(sessions: Iterable[_Session], traffic: ArmTraffic) -> list[_Session]:
    """Leave out what befell both policies alike, and sessions whose share is not certain."""
    answered = [call for call in traffic.calls if _answered(call) and call.policy not in ("", UPSTREAM_ARM)]
    answered_at = [call.at for call in answered]

    def end_of(outage: ArmCall) -> float:
        # Where calls are seldom, upstream's sessions of that time would stay in, and no policy's beside them.
        place = bisect_right(answered_at, outage.at)
        again = _began(answered[place]) if place < len(answered) else math.inf
        return max(outage.at + _DOWN_S, again)

    down: list[tuple[float, float]] = []  # apart from each other, in order
    for begin, end in sorted((_began(call) - _DOWN_S, end_of(call)) for call in traffic.calls if call.down):
        if down and begin <= down[-1][1]:
            begin, end = down[-1][0], max(end, down.pop()[1])
        down.append((begin, end))
    ends = [end for _, end in down]
    changes = [at for at, _ in traffic.shares]

    def is_settled(each: _Session) -> bool:
        return not any(0 <= each.began - at < SETTLE_S for at in changes)

    def was_served(each: _Session) -> bool:
        last = each.calls[-1].at
        place = bisect_right(ends, each.began)
        was_down = place < len(down) and down[place][0] <= last
        return all(call.policy for call in each.calls) and not was_down

    return [each for each in sessions if each.share and is_settled(each) and was_served(each)]


def _by_call(name: str, value: _Value, sessions: Iterable[_Session], now: float) -> list[Observation]:
    found: list[Observation] = []
    for each in sessions:
        at = each.ended
        if name == "failed":  # known at the first failure, long before the session ends
            at = min((call.at for call in each.calls if failed(call)), default=at)
        if at <= now and (one := value(each.calls)) is not None:
            joins = None if at == each.ended else each.ended
            found.append(Observation(at, each.challenger, one, each.share, joins=joins))
    return found


# --- scores ---

_Given = Mapping[str, Sequence[Score]]  # id of a run -> its scores


def _scores(scores: Iterable[Score]) -> _Given:
    given: dict[str, list[Score]] = defaultdict(list)
    for score in scores:
        given[score.trajectory_id].append(score)
    return given


def _run(key: str, given: _Given, until: float) -> Trajectory:
    """Return a run with the scores that were known until then."""
    return Trajectory(TrajectoryInfo(key, 0.0), (), tuple(score for score in given.get(key, ()) if score.at <= until))


def _earned(session: _Session, values: Mapping[str, float]) -> float | None:
    """Return the mean value of a session's runs; a run that upstream helped out has earned nothing."""
    helped = {call.trajectory_id for call in session.calls if call.fell_back}
    return fmean(0.0 if key in helped else value for key, value in values.items()) if values else None


_Known = Callable[[_Session, _Given, float], float | None]


def _first(session: _Session, value: _Known, given: _Given, now: float) -> Observation | None:
    """Return a session's value as it was when the session had ended and the first score was there; `None` without."""
    times = {score.at for key in session.runs & given.keys() for score in given[key]} if given else None
    if not times:
        return None
    latest = min(now, session.began + LATE_S)
    for at in (session.ended, *sorted(at for at in times if at > session.ended)):
        if at <= latest and (one := value(session, given, at)) is not None:
            return session.saw(at, one)
    return None


def _own_reward(session: _Session, given: _Given, until: float) -> float | None:
    own: dict[str, float] = {}
    for key in session.runs & given.keys():
        value = rewards.newest(_run(key, given, until), rewards.REWARD_NAME, rewards.REWARD_SOURCES)
        if value is not None:
            own[key] = value
    return _earned(session, own)


def _feedback(session: _Session, given: _Given, until: float) -> float | None:
    runs = [_run(key, given, until) for key in sorted(session.runs & given.keys())]
    said = rewards.satisfaction_G(Group("", "", "single", tuple(runs)))
    return _earned(session, {run.id: value for run, value in zip(runs, said, strict=True) if value is not None})


def _judged(
    sessions: Iterable[_Session], scores: _Given, given: _Given, now: float
) -> tuple[list[Observation], set[str]]:
    """Compare the first scores of each group: those of sessions that had no reward of their own; return whose, too."""
    groups: dict[str, dict[str, tuple[_Session, dict[str, float], float]]] = defaultdict(dict)
    for each in sessions:
        for call in each.calls:
            key, group = call.trajectory_id, call.group_id
            scored = None if group is None else _first_in_group(scores.get(key, ()), group)
            # An own reward that comes later changes nothing, or two looks would compare different values.
            if group is not None and scored is not None and _own_reward(each, given, scored.at) is None:
                _, values, _ = groups[group].setdefault(each.key, (each, {}, scored.at))
                values[key] = scored.value
    found: list[Observation] = []
    heard: set[str] = set()
    for members in sorted(groups.values(), key=lambda its: max(at for _, _, at in its.values())):
        known = max(at for _, _, at in members.values())
        earned = {key: (each, _earned(each, its) or 0.0) for key, (each, its, _) in members.items() if key not in heard}
        if known > now or len(earned) < 2:
            continue
        total = sum(value for _, value in earned.values())
        found += [each.saw(known, value, (total - value) / (len(earned) - 1)) for each, value in earned.values()]
        heard.update(earned)  # with `|=` and keys, each time all would be copied
    return found, heard


def _first_in_group(scores: Sequence[Score], group: str) -> Score | None:
    """Return the first combined reward of a run in a group, else its first score of the judge."""
    for name, source in ((rewards.REWARD_NAME, rewards.COMBINED), (rewards.SCORE_NAME, rewards.SCORE_SOURCE)):
        its = [one for one in scores if (one.name, one.source, one.group_id) == (name, source, group)]
        if its:
            return min(its, key=lambda one: (one.at, one.id))
    return None


# --- copies ---


def _pairs(
    copies: Sequence[ArmCall], originals: Sequence[ArmCall], now: float, rest_s: float
) -> dict[str, Sequence[Observation]]:
    """Compare the copies of each session, up to its first rest, with their originals."""
    theirs = {call.id: call for call in originals}
    both: dict[str, list[tuple[ArmCall, ArmCall]]] = defaultdict(list)
    for copy in copies:
        if (original := theirs.get(copy.shadow_of or "")) is not None:
            both[original.session].append((copy, original))
    found: dict[str, list[Observation]] = defaultdict(list)
    for every in both.values():
        pairs = every[:1]  # they are in the order in which the copies ended
        for pair in every[1:]:
            if pair[0].at > min(pairs[-1][0].at + rest_s, pairs[0][0].at + LONGEST_S):
                break
            pairs.append(pair)
        ended = pairs[-1][0].at
        for name, value in BY_CALL.items():
            ours, other = (value(calls) for calls in zip(*pairs, strict=True))
            # Copies are not streamed.
            if name != "ttft_ms" and ended + rest_s <= now and ours is not None and other is not None:
                found[name].append(Observation(ended, True, ours, champions=other))
    return {name: _in_order(its) for name, its in found.items()}
