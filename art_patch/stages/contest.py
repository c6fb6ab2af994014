"""A candidate and the champion, asked the same -> the gate's verdict."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from art_patch.gate import Turn, Verdict, contest, decide, held_out_turns
from art_patch.ids import new_id
from art_patch.promotion.promote import ensure_loaded
from art_patch.records import Choice, Policy
from art_patch.stages.asking import answer_again
from art_patch.stages.run import Cycle


def contest_of(run: Cycle, candidate: Policy, champion: Policy) -> Verdict:
    """Let both answer held-out turns, the judge rank the answers blind, and the gate decide.

    Raises:
        EngineError: the engine failed, or renders other prompts than those recorded.
        JudgeError: the judge scored nothing.
    """
    gate, engine, progress = run.config.gate, run.engine, run.progress
    turns = held_out_turns(
        run.store.read.groups(state="formed", held_out=True),
        scenarios=gate.max_scenarios,
        turns_per_scenario=gate.turns_per_scenario,
        seed=candidate.step,
    )
    ensure_loaded(engine, candidate.name)
    ensure_loaded(engine, champion.name)
    answers: list[tuple[Turn, tuple[Choice, ...], tuple[Choice, ...]]] = []

    def answers_of(policy: Policy, turn: Turn) -> tuple[Choice, ...]:
        sampled_at = turn.call.params.get("temperature")
        return answer_again(engine, policy.name, turn.call, gate.samples, temperature=sampled_at).choices

    def both(turn: Turn) -> tuple[Turn, tuple[Choice, ...], tuple[Choice, ...]]:
        return turn, answers_of(candidate, turn), answers_of(champion, turn)

    with ThreadPoolExecutor(16) as pool:
        asked = pool.map(both, turns)
        for done, answer in enumerate(asked, 1):
            answers.append(answer)
            progress("gate: answers", done, len(turns))
    contests = [(turn, *contest(turn, ours, theirs, new_id=new_id)) for turn, ours, theirs in answers]
    report = run.judge.score_groups(
        [group for _, group, _ in contests],
        purpose="gate",
        on_judgement=run.store.ledger.add_judgement,
        progress=lambda done, total: progress("gate: judge", done, total),
    )
    value = {score.trajectory_id: score.value for score in report.scores}
    pairs: list[tuple[str, float, float]] = []
    for turn, group, ours in contests:
        if group.id in report.unscored:
            continue
        by_us = [value[t.id] for t in group.trajectories if t.id in ours]
        by_them = [value[t.id] for t in group.trajectories if t.id not in ours]
        pairs.append((turn.scenario_key, sum(by_us) / len(by_us), sum(by_them) / len(by_them)))
    verdict = decide(pairs, gate, seed=candidate.step)
    if len(report.unscored) > len(contests) * gate.max_unscored:
        verdict = Verdict(False, f"the judge scored only {len(pairs)} of {len(contests)} turns", verdict.figures)
    run.figures["gate"] = {"turns": len(turns), "unscored": len(report.unscored)} | dict(verdict.figures)
    return verdict
