"""Whole runs of both policies on one held-out scenario, as the gate looks at them. Pure.

Where turns ask what a policy says to a prompt of the past, a run shows what becomes of the task: each policy's own
tools, own mistakes, own end. What the user's function raised is how that run ended, and it is ranked like the others.
A run counts for a policy if that policy alone answered what it was asked; otherwise it tells of somebody else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from art_patch.gate.collapse import Answered, Given
from art_patch.gate.config import GateConfig
from art_patch.gate.findings import Finding
from art_patch.gate.orders import Contest
from art_patch.gate.turns import Turn
from art_patch.trajectories import canonical
from art_patch.types import JSON, Call, Choice, Group, Trajectory, TrajectoryInfo


@dataclass(frozen=True, slots=True)
class Repeated:
    """A scenario that both policies ran again.

    Attributes:
        turn: a prompt of the recorded run, which says whose it was and what was asked.
        candidate: its runs.
        champion: its runs, as many.
    """

    turn: Turn
    candidate: tuple[Trajectory, ...]
    champion: tuple[Trajectory, ...]

    @property
    def runs(self) -> tuple[Trajectory, ...]:
        """Both policies' runs."""
        return (*self.candidate, *self.champion)


def speaks_of(run: Trajectory, policy: str) -> bool:
    """Whether the policy answered in this run, and nobody else in its place.

    Calls that no policy may answer, such as those with tools of the provider's, go upstream whoever serves.
    """
    answered = any(call.policy == policy and call.choices for call in run.calls)
    return answered and all(call.policy in (policy, None) and call.fallback is None for call in run.calls)


def run_contest(repeated: Repeated, *, new_id: Callable[[], str]) -> Contest:
    """Return the runs as one group for the judge that does not tell who answered, and the ids of the candidate's."""
    siblings = tuple(map(_blind, repeated.runs))
    group = Group(new_id(), repeated.turn.scenario_key, "gate", siblings, held_out=True)
    return repeated.turn, group, frozenset(run.id for run in repeated.candidate)


def answered_in(repeated: Repeated) -> Answered:
    """Return all that both answered in their runs, as answers to one turn that offers the tools of all calls."""
    tools: dict[bytes, JSON] = {}
    for run in repeated.runs:
        for call in run.calls:
            tools |= {canonical(tool): tool for tool in call.tools}
    turn = replace(repeated.turn, call=replace(repeated.turn.call, tools=tuple(tools.values())))
    return Answered(turn, _given(repeated.candidate), _given(repeated.champion))


def failed_runs(repeated: Sequence[Repeated], config: GateConfig) -> tuple[Finding, ...]:
    """Return whether many more of the candidate's runs end in an exception; nothing where none was repeated.

    Of so few runs, one that failed by chance must not decide: the shares are compared as they are.
    """
    if not repeated:
        return ()
    ours, theirs = (_failed([run for runs in of for run in runs]) for of in zip(*map(_sides, repeated), strict=True))
    bound = theirs + config.max_worse
    words = f"failed runs {ours:.3g} against {theirs:.3g}; at most {bound:.3g} is allowed"
    return (Finding("failed runs", ours, theirs, bound, ours <= bound, words),)


def _sides(repeated: Repeated) -> tuple[tuple[Trajectory, ...], tuple[Trajectory, ...]]:
    return repeated.candidate, repeated.champion


def _failed(runs: Sequence[Trajectory]) -> float:
    return fmean(run.info.error is not None for run in runs)


def _blind(run: Trajectory) -> Trajectory:
    return Trajectory(TrajectoryInfo(run.id, 0.0), tuple(map(_blind_call, run.calls)))


def _blind_call(call: Call) -> Call:
    return Call(
        id=call.id,
        trajectory_id=call.trajectory_id,
        started_at=0.0,
        requested_model=call.requested_model,
        messages=call.messages,
        tools=call.tools,
        choices=tuple(Choice(choice.index, choice.message, choice.finish_reason) for choice in call.choices),
    )


def _given(runs: Sequence[Trajectory]) -> Given:
    """What a policy answered, and how long it took in each run."""
    theirs = [call for run in runs for call in run.calls if call.policy is not None]
    choices = tuple(choice for call in theirs for choice in call.choices)
    return Given(choices, sum(call.duration_ms for call in theirs) / len(runs))
