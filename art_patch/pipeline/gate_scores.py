"""Both policies' answers and runs -> the judge's scores of them, blind and in each order.

What is a run of the app counts as any run does, by the project's combination: a reward of the app's own, or of a user's
check, stands before the judge, who is not asked then. Rewards beyond 1 are divided by the largest of this gate, because
all scenarios are compared on one scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from art_patch._lib.ids import new_id
from art_patch.gate import Contest, Judged, Repeated, merge_orders, run_contest
from art_patch.pipeline.cycle_run import Cycle
from art_patch.rewards import JudgeReport, Order, rewards_G, with_scores
from art_patch.types import Group, Score

_ORDERS: tuple[Order, ...] = ("shuffled", "reversed")


@dataclass(frozen=True, slots=True)
class Scored:
    """What came of judging.

    Attributes:
        judged: scores of both, turn by turn; a scenario that was run again counts as one turn.
        reports: the judge's, one an order.
        largest: what rewards were divided by, 1 where all lie within.
    """

    judged: Judged
    reports: tuple[JudgeReport, ...]
    largest: float


def scores_of(
    run: Cycle, turns: Sequence[Contest], repeated: Sequence[Repeated], checked: Sequence[Score] = ()
) -> Scored:
    """Let the judge rank what has no reward, and merge the orders.

    Args:
        run: the cycle.
        turns: both policies' answers to turns.
        repeated: scenarios that both ran again.
        checked: what the user's checks said of these runs.

    Raises:
        JudgeError: the judge scored nothing in one of the orders.
    """
    runs = [run_contest(one, new_id=new_id) for one in repeated]
    known = [
        with_scores(replace(group, trajectories=one.runs), checked)
        for one, (_, group, _) in zip(repeated, runs, strict=True)
    ]
    rule = run.config.combination
    unknown = [
        group for (_, group, _), seen in zip(runs, known, strict=True) if None in rewards_G(seen, combination=rule)
    ]
    reports = _reports(run, [*(group for _, group, _ in turns), *unknown])
    of_turns = {sibling.id for _, group, _ in turns for sibling in group.trajectories}
    orders = [{s.trajectory_id: s.value for s in report.scores if s.trajectory_id in of_turns} for report in reports]
    rewards = [
        {
            sibling.id: reward
            for seen in known
            for sibling, reward in zip(seen.trajectories, rewards_G(seen, report.scores, combination=rule), strict=True)
            if reward is not None
        }
        for report in reports
    ]
    largest = max([1.0, *(abs(reward) for given in rewards for reward in given.values())])
    for order, given in zip(orders, rewards, strict=True):
        order |= {key: reward / largest for key, reward in given.items()}
    return Scored(merge_orders([*turns, *runs], orders), tuple(reports), largest)


def _reports(run: Cycle, groups: Sequence[Group]) -> list[JudgeReport]:
    """What the judge says of the groups, one report an order; nothing that was said before is taken for an answer."""
    orders = _ORDERS[: run.config.gate.orders]
    reports: list[JudgeReport] = []
    for order in orders:
        before, total = len(reports) * len(groups), len(orders) * len(groups)
        report = run.judge.score_groups(
            groups,
            order=order,
            purpose="gate",
            on_judgement=run.store.ledger.add_judgement,
            progress=lambda done, _, before=before, total=total: run.progress("gate: judge", before + done, total),
        )
        reports.append(report)
    return reports
