"""The step `gate`: candidate and champion answer the same held-out scenarios, and the gate decides between them.

Both policies answer held-out turns and the prompts of the user's suite. If `--replay` is set, they repeat whole runs of
scenarios that can be repeated. Such a scenario counts once, and none of its single turns is used as well. The judge
ranks the answers without the policies' names, in both orders. The verdict is written to the ledger together with its
metrics: judge, rubric, a hash of all prompts, and one row for each check.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

from art_patch import gate, promotion
from art_patch._lib.ids import new_id
from art_patch.pipeline.cycle_run import Cycle
from art_patch.pipeline.gate_scores import Scored, check_findings, checked_by_side, compared_in, judge_both
from art_patch.pipeline.replay_runs import Reruns, rerun
from art_patch.pipeline.resample_turns import answer_again
from art_patch.types import Policy

_CONCURRENCY = 16


def run_gate(run: Cycle, candidate: Policy, champion: Policy) -> gate.Verdict:
    """Let both policies answer and the judge rank the answers, and return the verdict; no policy's state is changed.

    Raises:
        EngineError: the engine failed, or rendered a prompt that differs from the recorded one.
        JudgeError: the judge scored nothing in one of its orders.
    """
    # The candidate's step as seed: the same candidate is asked the same questions if a killed gate runs again.
    config, checks, seed = run.config.gate, run.config.checks, candidate.step
    held_out = _held_out(run, seed=seed)
    promotion.ensure_loaded(run.engine, candidate.name)
    promotion.ensure_loaded(run.engine, champion.name)
    reruns = rerun(run, held_out, candidate, champion)
    turns = [turn for turn in held_out.turns if turn.scenario_key not in reruns.keys]
    answers = _ask_both(run, (*turns, *config.suite), candidate, champion)
    comparisons = [
        (a.turn, *gate.blind_answers(a.turn, a.candidate.choices, a.champion.choices, new_id=new_id)) for a in answers
    ]
    compared = compared_in(answers, reruns.repeated)
    checked = checked_by_side(compared, checks)
    scored = judge_both(run, comparisons, reruns.repeated, [score for side in checked for score in side.scores])
    # A lost run is a scenario without a score, and not one that was never asked: too many of them reject.
    judged = replace(scored.judged, unscored=(*scored.judged.unscored, *(turn.scenario_key for turn in reruns.lost)))
    # The suite is a check of its own: its prompts were chosen by a person and say nothing about traffic.
    traffic = [pair for pair in judged.pairs if not pair[0].startswith(gate.PREFIX)]
    verdict = gate.decide(traffic, config, seed=seed)
    everything = (*answers, *map(gate.answered_in, reruns.repeated))
    findings = (
        *_unscored(judged, reruns, config),
        *_suite(judged, config, seed),
        *gate.collapse_findings(everything, config, kl_nats=_kl_nats(candidate), seed=seed),
        *gate.failed_runs(reruns.repeated, config),
        *check_findings(compared, checked, checks, config, seed=seed),
    )
    verdict = gate.with_findings(verdict, findings)
    asked = (*(a.turn for a in answers), *(one.turn for one in reruns.repeated), *reruns.lost)
    metrics = _counts(asked, held_out, judged, scored, config) | dict(verdict.metrics)
    if reruns.metrics is not None:
        metrics["reruns"] = dict(reruns.metrics) | ({"largest_reward": scored.largest} if scored.largest > 1 else {})
    metrics["checks"] = [asdict(finding) for finding in findings]
    run.metrics["gate"] = metrics
    return replace(verdict, reason=_reason(verdict, held_out), metrics=metrics)


def _held_out(run: Cycle, *, seed: int) -> gate.HeldOut:
    """Return the held-out turns to ask: none of users who just arrived, and not too many of one user."""
    config = run.config.gate
    groups = run.store.read.groups(state="formed", held_out=True)
    users = {t.info.user_id for group in groups for t in group.trajectories if t.info.user_id is not None}
    since, came = run.store.read.arrivals(sorted(users))
    # New accounts are cheap: without this rule, anybody could choose the questions of the gate overnight.
    new = frozenset[str]()
    if since is not None:
        new = gate.new_users(came, project_since=since, new_user_s=config.new_user_s, now=run.now)
    return gate.held_out_turns(
        groups,
        scenarios=config.max_scenarios,
        turns_per_scenario=config.turns_per_scenario,
        seed=seed,
        without=new,
        max_user_share=config.max_user_share,
    )


def _ask_both(run: Cycle, turns: Sequence[gate.Turn], candidate: Policy, champion: Policy) -> list[gate.Answered]:
    """Return the answers of candidate and champion to each turn."""

    def answers_of(policy: Policy, turn: gate.Turn) -> gate.Given:
        temperature, samples = turn.call.params.get("temperature"), run.config.gate.samples
        answers = answer_again(run.engine, policy.name, turn.call, samples, temperature=temperature)
        return gate.Given(answers.choices, answers.duration_ms)

    def both(place: int, turn: gate.Turn) -> gate.Answered:
        # The order alternates: latency is compared too, and the second policy finds the prompt in the engine's cache.
        if place % 2:
            theirs = answers_of(champion, turn)
            return gate.Answered(turn, answers_of(candidate, turn), theirs)
        return gate.Answered(turn, answers_of(candidate, turn), answers_of(champion, turn))

    answers: list[gate.Answered] = []
    with ThreadPoolExecutor(_CONCURRENCY) as pool:
        for done, answered in enumerate(pool.map(both, range(len(turns)), turns), 1):
            answers.append(answered)
            run.progress("gate: answers", done, len(turns))
    return answers


def _unscored(judged: gate.Judged, reruns: Reruns, config: gate.GateConfig) -> tuple[gate.Finding, ...]:
    # Turns without a score may be exactly the bad ones, so too many of them reject.
    asked = len(judged.pairs) + len(judged.unscored)
    share = len(judged.unscored) / asked if asked else 0.0
    words = f"the judge scored {'only ' if judged.unscored else ''}{len(judged.pairs)} of {asked} turns"
    if reruns.repeated or reruns.lost:
        words += f" and runs ({len(reruns.lost)} of the scenarios that were run again were lost)"
    return (gate.Finding("unscored", share, None, config.max_unscored, share <= config.max_unscored, words),)


def _suite(judged: gate.Judged, config: gate.GateConfig, seed: int) -> tuple[gate.Finding, ...]:
    """Return the finding on the user's suite; it fails if one of its prompts has no score."""
    if not config.suite:
        return ()
    if missing := [key for key in judged.unscored if key.startswith(gate.PREFIX)]:
        words = f"suite: {len(missing)} of {len(config.suite)} prompts have no score"
        return (gate.Finding("suite", None, None, config.max_worse, False, words),)
    pairs = [pair for pair in judged.pairs if pair[0].startswith(gate.PREFIX)]
    return (gate.not_worse("suite", pairs, allowed=config.max_worse, level=config.level, seed=seed),)


def _kl_nats(candidate: Policy) -> float | None:
    # The update measured it. A policy that was imported has no such metric.
    kl_nats: Any = candidate.metrics.get("train", {}).get("kl_nats")
    return float(kl_nats) if isinstance(kl_nats, int | float) else None


def _counts(
    asked: Sequence[gate.Turn], held_out: gate.HeldOut, judged: gate.Judged, scored: Scored, config: gate.GateConfig
) -> dict[str, Any]:
    judgement = next((judgement for report in scored.reports for judgement in report.judgements), None)
    return {
        "turns": len(asked),
        "suite": len(config.suite),
        "unscored": len(judged.unscored),
        "left": dict(held_out.left),
        "order_disagreement": judged.order_disagreement,
        "judge": judgement.judge if judgement else None,
        "rubric": judgement.rubric if judgement else None,
        "judge_calls": sum(report.calls for report in scored.reports),
        "data_sha256": gate.data_hash(asked),
        "config": {name: value for name, value in asdict(replace(config, suite=())).items() if name != "suite"},
    }


def _reason(verdict: gate.Verdict, held_out: gate.HeldOut) -> str:
    # With too few scenarios the gate rejects, so a rejection says why others were not asked.
    if verdict.promote or not held_out.left:
        return verdict.reason
    left = "; ".join(f"{count} {why}" for why, count in held_out.left.items())
    return f"{verdict.reason} (held out but not asked: {left})"
