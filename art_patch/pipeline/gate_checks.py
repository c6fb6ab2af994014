"""The user's checks on both policies' answers: whatever they measure may not get worse, and they must be able to say.

A check runs on each answer as on a run of its own: the prompt, and the answer; on a scenario that was run again, on the
runs. What it returns is compared turn by turn, on a scale from 0 to 1. A check that has nothing to say of a turn leaves
it out; one that fails on more answers than the gate allows, or speaks of one policy alone, rejects.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from art_patch._lib.ids import new_id
from art_patch.gate import Answered, Finding, GateConfig, Given, Repeated, Turn, not_worse
from art_patch.rewards import Check, Checked, run_checks
from art_patch.types import Call, Choice, Score, Trajectory, TrajectoryInfo


class Compared(NamedTuple):
    """What a check compares: the candidate's runs and the champion's, with what the user said of the recorded one."""

    scenario_key: str
    sides: tuple[tuple[Trajectory, ...], tuple[Trajectory, ...]]


def compared_in(answers: Sequence[Answered], repeated: Sequence[Repeated]) -> list[Compared]:
    """Return each turn's answers as runs, and the runs of the scenarios that were run again."""
    turns = [Compared(a.turn.scenario_key, (_runs(a.turn, a.candidate), _runs(a.turn, a.champion))) for a in answers]
    return turns + [Compared(one.turn.scenario_key, (one.candidate, one.champion)) for one in repeated]


def checked_by_side(compared: Sequence[Compared], checks: Sequence[Check]) -> tuple[Checked, Checked]:
    """Return what the checks say of the candidate's runs, and of the champion's."""
    ours, theirs = ([run for one in compared for run in one.sides[side]] for side in (0, 1))
    return run_checks(ours, checks), run_checks(theirs, checks)


def check_findings(
    compared: Sequence[Compared],
    found: tuple[Checked, Checked],
    checks: Sequence[Check],
    config: GateConfig,
    *,
    seed: int = 0,
) -> tuple[Finding, ...]:
    """Return one row for each score that the checks gave, and one for each check that failed too often."""
    range_of = {check.version: (check.lowest, check.highest) for check in checks}
    heard: dict[str, tuple[dict[int, float], dict[int, float]]] = defaultdict(lambda: ({}, {}))
    findings: list[Finding] = []
    for side, who in enumerate(("candidate", "champion")):
        place_of = {run.id: place for place, one in enumerate(compared) for run in one.sides[side]}
        findings += _failures(found[side].failures, len(place_of), who, config)
        values: dict[tuple[str, int], list[float]] = defaultdict(list)
        for score in found[side].scores:
            values[score.name, place_of[score.trajectory_id]].append(_scaled(score, range_of[score.rubric or ""]))
        for (name, place), given in values.items():
            heard[name][side][place] = fmean(given)
    for name, (ours, theirs) in heard.items():
        findings.append(_compared(name, compared, ours, theirs, config, seed))
    return tuple(findings)


def _runs(turn: Turn, given: Given) -> tuple[Trajectory, ...]:
    return tuple(_run(turn, choice) for choice in given.choices)


def _run(turn: Turn, choice: Choice) -> Trajectory:
    """The answer as the check sees it: with what the user said of the run that the turn is from."""
    key = new_id()
    info = replace(turn.info or TrajectoryInfo(key, 0.0), id=key)
    call: Call = replace(turn.call, id=new_id(), trajectory_id=key, choices=(replace(choice, index=0),), policy=None)
    return Trajectory(info, (call,))


def _scaled(score: Score, bounds: tuple[float, float]) -> float:
    lowest, highest = bounds
    return (score.value - lowest) / (highest - lowest)


def _failures(failures: dict[str, int], answers: int, who: str, config: GateConfig) -> list[Finding]:
    return [
        Finding(
            reason.partition(":")[0], None, None, config.max_unscored, False,
            f"check {reason}, on {count} of {answers} answers of the {who}; mend the check",
        )
        for reason, count in failures.items()
        if count > answers * config.max_unscored
    ]  # fmt: skip


def _compared(
    name: str, compared: Sequence[Compared], ours: dict[int, float], theirs: dict[int, float], config: GateConfig,
    seed: int,
) -> Finding:  # fmt: skip
    either, both = ours.keys() | theirs.keys(), ours.keys() & theirs.keys()
    if len(either - both) > len(either) * config.max_unscored:
        words = f"check {name} speaks of one policy's answers alone on {len(either - both)} of {len(either)} turns"
        return Finding(name, None, None, config.max_unscored, False, words)
    pairs = [(compared[place].scenario_key, ours[place], theirs[place]) for place in sorted(both)]
    return not_worse(f"check {name}", pairs, allowed=config.max_worse, level=config.level, seed=seed)
