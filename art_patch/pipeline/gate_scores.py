"""The scores that the gate compares: the judge's in each order, and those of the user's checks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from art_patch import gate, rewards
from art_patch._lib.ids import new_id
from art_patch.pipeline.cycle_run import Cycle
from art_patch.types import Choice, Group, Score, Trajectory, TrajectoryInfo

_ORDERS: tuple[rewards.Order, ...] = ("shuffled", "reversed")


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of candidate and champion in one gate.

    Attributes:
        judged: both policies' scores for each turn. A repeated scenario counts as one turn.
        reports: the judge's reports, one for each order.
        largest: rewards of repeated runs are divided by this number, the largest of them, so that they fit the judge's
            scale; 1 if no reward is larger.
    """

    judged: gate.Judged
    reports: tuple[rewards.JudgeReport, ...]
    largest: float


def judge_both(
    run: Cycle, turns: Sequence[gate.BlindComparison], repeated: Sequence[gate.Repeated], checked: Sequence[Score] = ()
) -> Scored:
    """Let the judge rank the answers, and the runs without a reward of their own; average its scores over the orders.

    Args:
        turns: both policies' answers to recorded turns.
        repeated: scenarios of which both policies repeated a whole run.
        checked: scores that the user's checks gave to these runs.

    Raises:
        JudgeError: the judge scored nothing in one of its orders.
    """
    runs = [gate.blind_runs(one, new_id=new_id) for one in repeated]
    # A repeated run is scored like any run of the app: a reward by the app or by a check replaces the judge.
    known = [
        rewards.with_scores(replace(group, trajectories=one.runs), checked)
        for one, (_, group, _) in zip(repeated, runs, strict=True)
    ]
    rule = run.config.combination
    unknown = [
        group
        for (_, group, _), seen in zip(runs, known, strict=True)
        if None in rewards.rewards_G(seen, combination=rule)
    ]
    reports = _judge_reports(run, [*(group for _, group, _ in turns), *unknown])
    of_turns = {sibling.id for _, group, _ in turns for sibling in group.trajectories}
    # Scores of turns come from the judge alone: an answer to a single turn has no reward of the app.
    orders = [{s.trajectory_id: s.value for s in report.scores if s.trajectory_id in of_turns} for report in reports]
    rewards_of_runs = [
        {
            sibling.id: reward
            for seen in known
            for sibling, reward in zip(
                seen.trajectories, rewards.rewards_G(seen, report.scores, combination=rule), strict=True
            )
            if reward is not None
        }
        for report in reports
    ]
    # The judge's scores lie in 0..1 and an app's rewards need not. All scenarios are compared on one scale, so all
    # rewards are divided by the largest of this gate.
    largest = max([1.0, *(abs(reward) for of_runs in rewards_of_runs for reward in of_runs.values())])
    for order, of_runs in zip(orders, rewards_of_runs, strict=True):
        order |= {key: reward / largest for key, reward in of_runs.items()}
    return Scored(gate.merge_orders([*turns, *runs], orders), tuple(reports), largest)


def _judge_reports(run: Cycle, groups: Sequence[Group]) -> list[rewards.JudgeReport]:
    """Return the judge's report on the groups for each order. The judge's cache is not used."""
    orders = _ORDERS[: run.config.gate.orders]
    reports: list[rewards.JudgeReport] = []
    for order in orders:
        before, total = len(reports) * len(groups), len(orders) * len(groups)
        report = run.judge.score_groups(
            groups,
            order=order,
            # `known` stays empty: old scores were given beside other siblings, and the gate compares these two.
            purpose="gate",
            on_judgement=run.store.ledger.add_judgement,
            progress=lambda done, _, before=before, total=total: run.progress("gate: judge", before + done, total),
        )
        reports.append(report)
    return reports


class Compared(NamedTuple):
    """What the user's checks score for one turn or scenario; `sides` has the candidate's runs, then the champion's."""

    scenario_key: str
    sides: tuple[tuple[Trajectory, ...], tuple[Trajectory, ...]]


def compared_in(answers: Sequence[gate.Answered], repeated: Sequence[gate.Repeated]) -> list[Compared]:
    """Return what the checks score: each answer to a turn as a run of one call, and the runs of repeated scenarios."""
    turns = [Compared(a.turn.scenario_key, (_runs(a.turn, a.candidate), _runs(a.turn, a.champion))) for a in answers]
    return turns + [Compared(one.turn.scenario_key, (one.candidate, one.champion)) for one in repeated]


def checked_by_side(
    compared: Sequence[Compared], checks: Sequence[rewards.Check]
) -> tuple[rewards.Checked, rewards.Checked]:
    """Run the checks; return their scores of the candidate's runs, and of the champion's runs."""
    ours, theirs = ([run for one in compared for run in one.sides[side]] for side in (0, 1))
    return rewards.run_checks(ours, checks), rewards.run_checks(theirs, checks)


def check_findings(
    compared: Sequence[Compared],
    found: tuple[rewards.Checked, rewards.Checked],
    checks: Sequence[rewards.Check],
    config: gate.GateConfig,
    *,
    seed: int = 0,
) -> tuple[gate.Finding, ...]:
    """Return a finding for each score of the checks, and one for each check that fails too often.

    A score's finding passes if the test proves, at `config.level`, that the candidate is worse than the champion by at
    most `config.max_worse` (a share of the check's range). Turns without a score are left out. If only one policy has
    scores on too many turns (`config.max_unscored`), the finding fails, too.
    """
    range_of = {check.version: (check.lowest, check.highest) for check in checks}
    heard: dict[str, tuple[dict[int, float], dict[int, float]]] = defaultdict(lambda: ({}, {}))
    findings: list[gate.Finding] = []
    for side, who in enumerate(("candidate", "champion")):
        place_of = {run.id: place for place, one in enumerate(compared) for run in one.sides[side]}
        findings += _failures(found[side].failures, len(place_of), who, config)
        values: dict[tuple[str, int], list[float]] = defaultdict(list)
        for score in found[side].scores:
            # Onto 0..1, because the gate's `max_worse` is a share of the scale.
            lowest, highest = range_of[score.rubric or ""]
            values[score.name, place_of[score.trajectory_id]].append((score.value - lowest) / (highest - lowest))
        for (name, place), given in values.items():
            heard[name][side][place] = fmean(given)
    for name, (ours, theirs) in heard.items():
        findings.append(_compare(name, compared, ours, theirs, config, seed))
    return tuple(findings)


def _runs(turn: gate.Turn, given: gate.Given) -> tuple[Trajectory, ...]:
    def run(choice: Choice) -> Trajectory:
        key = new_id()
        # With the recorded run's metadata, where a check may find the right answer. Without the policy's name: a check
        # must not know whose answer it sees.
        info = replace(turn.info or TrajectoryInfo(key, 0.0), id=key)
        choices = (replace(choice, index=0),)
        call = replace(turn.call, id=new_id(), trajectory_id=key, choices=choices, policy=None)
        return Trajectory(info, (call,))

    return tuple(map(run, given.choices))


def _failures(failures: dict[str, int], answers: int, who: str, config: gate.GateConfig) -> list[gate.Finding]:
    return [
        gate.Finding(
            reason.partition(":")[0], None, None, config.max_unscored, False,
            f"check {reason}, on {count} of {answers} answers of the {who}; mend the check",
        )
        for reason, count in failures.items()
        if count > answers * config.max_unscored
    ]  # fmt: skip


def _compare(
    name: str, compared: Sequence[Compared], ours: dict[int, float], theirs: dict[int, float], config: gate.GateConfig,
    seed: int,
) -> gate.Finding:  # fmt: skip
    either, both = ours.keys() | theirs.keys(), ours.keys() & theirs.keys()
    # A candidate must not pass by answers that the check cannot score, so missing scores of one side reject.
    if len(either - both) > len(either) * config.max_unscored:
        words = f"check {name} speaks of one policy's answers alone on {len(either - both)} of {len(either)} turns"
        return gate.Finding(name, None, None, config.max_unscored, False, words)
    pairs = [(compared[place].scenario_key, ours[place], theirs[place]) for place in sorted(both)]
    return gate.not_worse(f"check {name}", pairs, allowed=config.max_worse, level=config.level, seed=seed)
