"""The turns that both policies answer, and the groups that the judge ranks.

Whoever sends traffic chooses what the gate asks, so nobody may choose much of it: a user who just arrived has no say,
and a user who sends a lot makes up no more than a share of the scenarios.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from art_patch.trajectories import canonical
from art_patch.types import Call, Choice, Group, Trajectory, TrajectoryInfo

_ASKABLE = (None, "answered by upstream", "greedy sampling has no exploration")
"""Whoever answered, and however it was sampled, the prompt is traffic's."""
_MIN_USERS = 4
"""With fewer known users a share says nothing, and one may well be all there is."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A call of held-out traffic, to be answered again.

    Attributes:
        scenario_key: of the task that it belongs to.
        call: what is asked.
        info: the run that the call is from; user checks see it, the judge does not.
    """

    scenario_key: str
    call: Call
    info: TrajectoryInfo | None = None


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What the gate asks, and what it leaves out.

    Attributes:
        turns: to be answered.
        left: why scenarios are not asked although they are held out -> how many.
        runs: of each scenario that is asked, those that have a say, newest first.
    """

    turns: tuple[Turn, ...]
    left: Mapping[str, int]
    runs: Mapping[str, tuple[TrajectoryInfo, ...]] = field(default_factory=dict[str, tuple[TrajectoryInfo, ...]])


def new_users(
    first_seen: Mapping[str, float], *, project_since: float, new_user_s: float, now: float
) -> frozenset[str]:
    """Return the users who arrived so lately that they have no say in what is promoted.

    Who came in the project's own first `new_user_s` is never new, or nothing could be tested until then.

    Args:
        first_seen: when each user came, seconds since the epoch.
        project_since: when the first of all traffic came.
        new_user_s: how long a user stays new.
        now: seconds since the epoch.
    """
    since = max(now - new_user_s, project_since + new_user_s)
    return frozenset(user for user, at in first_seen.items() if at > since)


def held_out_turns(
    groups: Sequence[Group],
    *,
    scenarios: int,
    turns_per_scenario: int,
    seed: int,
    without: frozenset[str] = frozenset(),
    max_user_share: float = 1.0,
) -> HeldOut:
    """Choose turns from held-out groups, newest scenarios first, spread over the depths of their conversations.

    Args:
        groups: held out, oldest first.
        scenarios: at most this many.
        turns_per_scenario: at most this many of each, of different depths where there are any.
        seed: of the choice among calls of one depth.
        without: users whose runs are not asked, such as those who just arrived.
        max_user_share: of the scenarios that are one user's alone, where four users or more are known; never less than
            twice an equal share. Runs without a user are nobody's.
    """
    calls: dict[str, list[tuple[TrajectoryInfo, Call]]] = defaultdict(list)
    runs: dict[str, list[TrajectoryInfo]] = defaultdict(list)
    silenced: set[str] = set()
    for group in reversed(groups):
        for run in group.trajectories:
            if run.info.user_id in without:
                silenced.add(group.scenario_key)
                continue
            askable = [(run.info, c) for c in run.calls if c.untrainable in _ASKABLE and c.choices]
            if askable:
                calls[group.scenario_key] += askable
                runs[group.scenario_key].append(run.info)
    owner_of = {key: _owner(theirs) for key, theirs in calls.items()}
    keys, surplus = _within_share(owner_of, scenarios, max_user_share)
    left = {
        "of users who just arrived": len(silenced - calls.keys()),
        "a user's scenarios are more than their share": surplus,
    }
    rng = random.Random(seed)
    turns = tuple(turn for key in keys for turn in _spread(key, calls[key], turns_per_scenario, rng))
    newest = {key: tuple(sorted(runs[key], key=attrgetter("started_at"), reverse=True)) for key in keys}
    return HeldOut(turns, {reason: count for reason, count in left.items() if count}, newest)


def contest(
    turn: Turn, candidate: Sequence[Choice], champion: Sequence[Choice], *, new_id: Callable[[], str]
) -> tuple[Group, frozenset[str]]:
    """Return the turn's answers as one group for the judge, and the ids of those that the candidate gave.

    Nothing in the group says who answered: the judge sees the turn's prompt and the answers in random order.
    """
    ours: set[str] = set()
    siblings: list[Trajectory] = []
    for is_candidate, choices in ((True, candidate), (False, champion)):
        for choice in choices:
            siblings.append(as_run(turn, choice, new_id=new_id))
            if is_candidate:
                ours.add(siblings[-1].id)
    return Group(new_id(), turn.scenario_key, "gate", tuple(siblings), held_out=True), frozenset(ours)


def as_run(turn: Turn, choice: Choice, *, new_id: Callable[[], str]) -> Trajectory:
    """Return an answer to the turn as a run of its own that does not tell which policy gave it."""
    key = new_id()
    call = Call(
        id=new_id(),
        trajectory_id=key,
        started_at=0.0,
        requested_model=turn.call.requested_model,
        messages=turn.call.messages,
        tools=turn.call.tools,
        choices=(Choice(0, choice.message, choice.finish_reason),),
    )
    return Trajectory(TrajectoryInfo(key, 0.0), (call,))


def data_hash(turns: Sequence[Turn]) -> str:
    """Return the sha256 of what is asked: the same turns in any order have the same."""
    digests = sorted(
        hashlib.sha256(b"\0".join((turn.scenario_key.encode("utf-8", "surrogatepass"), *_asked(turn.call)))).digest()
        for turn in turns
    )
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _asked(call: Call) -> Iterator[bytes]:
    yield from map(canonical, call.messages)
    yield b"\0tools"
    yield from map(canonical, call.tools)


def _owner(theirs: Sequence[tuple[TrajectoryInfo, Call]]) -> str | None:
    """The user whose scenario it is alone."""
    users = {info.user_id for info, _ in theirs}
    return users.pop() if len(users) == 1 else None


def _within_share(owner_of: Mapping[str, str | None], limit: int, max_share: float) -> tuple[list[str], int]:
    """The newest scenarios, and how many were passed over: the oldest of users who have more than their share."""
    waiting, users = list(owner_of), {owner for owner in owner_of.values() if owner is not None}
    share = max(max_share, 2 / max(1, len(users)))
    while len(users) >= _MIN_USERS:
        taken = waiting[:limit]
        count_of = Counter(owner for key in taken if (owner := owner_of[key]) is not None)
        user, count = max(sorted(count_of.items()), key=lambda item: item[1], default=("", 0))
        if count <= max(1.0, share * len(taken)):
            break
        waiting.remove(next(key for key in reversed(taken) if owner_of[key] == user))
    return waiting[:limit], len(owner_of) - len(waiting)


def _spread(key: str, theirs: Sequence[tuple[TrajectoryInfo, Call]], limit: int, rng: random.Random) -> list[Turn]:
    """Turns of different depths first, then further ones; of one prompt, one."""
    by_depth: dict[int, dict[Any, Turn]] = defaultdict(dict)
    for info, call in theirs:
        prompt = call.prompt_token_ids or tuple(map(canonical, call.messages))
        by_depth[len(call.messages)].setdefault(prompt, Turn(key, call, info))
    depths = [rng.sample(list(same.values()), len(same)) for _, same in sorted(by_depth.items())]
    deepest = max(map(len, depths), default=0)
    return [same[rank] for rank in range(deepest) for same in depths if rank < len(same)][:limit]
