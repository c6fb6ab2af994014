"""The turns that both policies answer, and the groups that the judge ranks."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from art_patch.chain import canonical
from art_patch.records import Call, Choice, Group, Trajectory, TrajectoryInfo

_ASKABLE = (None, "answered by upstream", "greedy sampling has no exploration")
"""Whoever answered, and however it was sampled, the prompt is traffic's."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A call of held-out traffic, to be answered again."""

    scenario_key: str
    call: Call


def held_out_turns(groups: Sequence[Group], *, scenarios: int, turns_per_scenario: int, seed: int) -> tuple[Turn, ...]:
    """Choose turns from held-out groups, newest scenarios first, spread over the depths of their conversations.

    Args:
        groups: held out, oldest first.
        scenarios: at most this many.
        turns_per_scenario: at most this many of each, of different depths where there are any.
        seed: of the choice among calls of one depth.
    """
    calls: dict[str, list[Call]] = defaultdict(list)
    for group in reversed(groups):
        for trajectory in group.trajectories:
            calls[group.scenario_key] += [c for c in trajectory.calls if c.untrainable in _ASKABLE and c.choices]
    rng = random.Random(seed)
    chosen: list[Turn] = []
    for key in list(calls)[:scenarios]:
        by_depth: dict[int, dict[Any, Call]] = defaultdict(dict)
        for call in calls[key]:
            by_depth[len(call.messages)].setdefault(call.prompt_token_ids or tuple(map(canonical, call.messages)), call)
        depths = [rng.sample(list(same.values()), len(same)) for _, same in sorted(by_depth.items())]
        taken = [same[rank] for rank in range(max(map(len, depths), default=0)) for same in depths if rank < len(same)]
        chosen += [Turn(key, call) for call in taken[:turns_per_scenario]]
    return tuple(chosen)


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
            siblings.append(Trajectory(TrajectoryInfo(key, 0.0), (call,)))
            if is_candidate:
                ours.add(key)
    return Group(new_id(), turn.scenario_key, "gate", tuple(siblings), held_out=True), frozenset(ours)
