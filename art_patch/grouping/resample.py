"""Siblings for a run that has none: some of its turns, answered again from their exact prompts. Pure.

Production sees each task once, and an advantage needs something to compare with. So the served policy answers a
captured turn a few more times; no tool is run, because the prompt holds what the tools returned. The answers and the
one that was really given make a group of their own, about this turn alone. The judge also sees what really followed.

The app's own answer joins as a copy, cut off after the turn. If it came from our policy it is one more sample; if it
came from upstream it is ranked with the others and never trained on.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from art_patch.grouping.askable import can_be_asked_again
from art_patch.trajectories import chosen_choice, followed
from art_patch.types import Call, Choice, Group, Trajectory, TrajectoryInfo

Pick = Literal["last", "fault", "spread"]

_TROUBLE = ("error", "exception", "traceback", "not found", "no such", "invalid", "failed", "denied", "bad call")
"""How a tool's result begins to look when the call before it was wrong; a hint of where to look, nothing more."""


@dataclass(frozen=True, slots=True)
class ResampleConfig:
    """How siblings are made.

    Attributes:
        samples: further answers to each turn.
        turns: of each run, at most.
        pick: `spread` takes turns of all depths in turn, `last` the last ones, `fault` the one that a correction names,
            else the one before a tool's result that looks like an error, else the last.
        max_turns: in one cycle; the budget.
        per_minute: turns asked at most; `None` for no limit.
        window: local time of day in which the engine may be asked, `22:00-06:00`; `None` for always.
        temperature: of the sampling where the app's own would not explore (0, or none recorded).
        concurrency: turns asked at once.
        priority: as vLLM has it: larger waits for smaller; the app's own calls have 0.
    """

    samples: int = 7
    turns: int = 1
    pick: Pick = "spread"
    max_turns: int = 200
    per_minute: float | None = None
    window: str | None = None
    temperature: float = 1.0
    concurrency: int = 4
    priority: int = 100


@dataclass(frozen=True, slots=True)
class ResampleTurn:
    """A turn that is to be answered again."""

    trajectory: Trajectory
    call: Call
    scenario_key: str

    @property
    def answer(self) -> Choice | None:
        """The answer that the app went on with."""
        calls = self.trajectory.calls
        return chosen_choice(self.call, calls[calls.index(self.call) + 1 :])


def choose_turns(
    trajectories: Sequence[Trajectory],
    config: ResampleConfig,
    *,
    keys: Mapping[str, str],
    corrected: Mapping[str, str] | None = None,
) -> tuple[tuple[ResampleTurn, ...], dict[str, int]]:
    """Choose turns within the budget, a run's first choice before any run's second.

    Args:
        trajectories: runs without siblings, most important first.
        config: how.
        keys: trajectory id -> scenario key.
        corrected: trajectory id -> id of the call that a person corrected.

    Returns:
        The turns, and for the runs that got none why, with how many.
    """
    left: Counter[str] = Counter()
    ranked: list[list[ResampleTurn]] = []
    for trajectory in trajectories:
        calls = [call for call in trajectory.calls if can_be_asked_again(call)]
        if not calls:
            left["no turn can be answered again"] += 1
            continue
        first = _first_choice(trajectory, calls, config.pick, (corrected or {}).get(trajectory.id))
        ordered = calls[first:] + calls[:first] if config.pick == "spread" else [calls[first], *reversed(calls[:first])]
        ranked.append([ResampleTurn(trajectory, call, keys[trajectory.id]) for call in ordered[: config.turns]])
    by_rank = [turns[rank] for rank in range(config.turns) for turns in ranked if rank < len(turns)]
    chosen = by_rank[: config.max_turns]
    asked = {turn.trajectory.id for turn in chosen}
    if spared := sum(turns[0].trajectory.id not in asked for turns in ranked):
        left["beyond the budget of this cycle"] += spared
    return tuple(chosen), dict(left)


def turn_group(
    turn: ResampleTurn, alternatives: Sequence[Call], *, new_id: Callable[[], str], at: float
) -> Group | None:
    """Return the group of a turn; `None` if all its answers are the same, because then nothing can be learned.

    Args:
        turn: what was answered again.
        alternatives: one call for each further answer, without a trajectory yet.
        new_id: makes ids.
        at: when, seconds since the epoch.
    """
    answer = turn.answer
    given = [] if answer is None else [replace(turn.call, choices=(answer,), status="ok")]
    siblings = tuple(_sibling(turn, call, new_id, at) for call in (*given, *alternatives))
    if len({_answer(sibling) for sibling in siblings}) < 2:
        return None
    return Group(
        new_id(),
        turn.scenario_key,
        "resampled",
        siblings,
        followed=followed(turn.trajectory, turn.call),
    )


def _sibling(turn: ResampleTurn, call: Call, new_id: Callable[[], str], at: float) -> Trajectory:
    source, key = turn.trajectory.info, new_id()
    info = TrajectoryInfo(
        key,
        at,
        "resampled",
        name=source.name,
        scenario_key=source.scenario_key,
        session_id=source.session_id,
        user_id=source.user_id,
    )
    return Trajectory(info, (replace(call, id=new_id(), trajectory_id=key, span_id=None, shadow_of=turn.call.id),))


def _answer(sibling: Trajectory) -> str:
    message = sibling.calls[0].choices[0].message
    calls: Any = message.get("tool_calls") or ()
    return repr((message.get("content") or "", [call.get("function") for call in calls]))


def _first_choice(trajectory: Trajectory, calls: Sequence[Call], pick: Pick, corrected: str | None) -> int:
    """Which of the calls comes first."""
    if pick == "spread":
        # By the run's id, so that over many runs every depth has its turn and a second look chooses the same.
        return int.from_bytes(hashlib.blake2b(trajectory.id.encode(), digest_size=4).digest()) % len(calls)
    if pick == "fault":
        for index, call in enumerate(calls):
            if call.id == corrected or _went_wrong(trajectory, call):
                return index
    return len(calls) - 1


def _went_wrong(trajectory: Trajectory, call: Call) -> bool:
    """Whether the messages right after the answer are tool results and one of them looks like an error."""
    for message in followed(trajectory, call):
        if message.get("role") != "tool":
            return False
        if any(word in str(message.get("content"))[:200].casefold() for word in _TROUBLE):
            return True
    return False
