"""Keeps what both policies answered in a gate, so that people can read why a candidate won or lost a prompt.

In: the answers, as groups in which the judge ranked them, and its reports. Out: rows in the store, one for each turn
of the traffic, in place of those of an earlier gate of both policies. Prompts of the suite are left out, because no run
of the store would take their answers along when it is erased. So are whole runs that were repeated.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import cast

from art_patch import gate
from art_patch.pipeline.cycle_run import Cycle
from art_patch.recording import Redactor
from art_patch.rewards import JudgeReport
from art_patch.store import GateTurn
from art_patch.types import JSON, UPSTREAM_ARM, Call, Choice, Policy


def keep_answers(
    run: Cycle, candidate: Policy, champion: Policy | None, groups: Mapping[str, str],
    compared: Sequence[gate.BlindComparison], reports: Sequence[JudgeReport],
) -> None:  # fmt: skip
    """Keep the answers in `compared`, with the mean of the scores that the judge gave each of them.

    `groups` has the newest group of each scenario, by which the gate's results name it. Texts are redacted if the job
    is set to, as an app redacts what an engine answers before it is recorded.
    """
    redact = None if run.config.redact is None else Redactor(run.config.redact)
    scores: dict[str, list[float]] = defaultdict(list)
    for report in reports:
        for score in report.scores:
            scores[score.trajectory_id].append(score.value)
    turns: list[GateTurn] = []
    for turn, siblings, ours in compared:
        if turn.scenario_key.startswith(gate.PREFIX):
            continue
        sides: tuple[list[JSON], list[JSON]] = ([], [])
        for sibling in siblings.trajectories:
            (call,) = sibling.calls
            (choice,) = (call if redact is None else cast("Call", redact(call))).choices
            given = scores.get(sibling.id)
            sides[sibling.id not in ours].append(_answer(choice, fmean(given) if given else None))
        turns.append(
            GateTurn(turn.call.id, turn.call.trajectory_id, groups[turn.scenario_key], tuple(sides[0]), tuple(sides[1]))
        )
    run.store.gate_answers.keep(candidate.name, UPSTREAM_ARM if champion is None else champion.name, turns)


def _answer(choice: Choice, score: float | None) -> JSON:
    return {"message": dict(choice.message), "finish_reason": choice.finish_reason, "score": score}
