"""A candidate and the champion, asked the same -> the gate's verdict.

Both answer held-out turns and the user's suite, or run held-out scenarios again where `rerun` can; the judge ranks
blind, in both orders; the gate decides on the scores, and on what scores do not show. A scenario that was run again
counts once, as one turn, and none of its turns is asked besides. The metrics go into the verdict, and with it into the
ledger's move: who judged by which rubric, a hash of what was asked, each check as a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

from art_patch._lib.ids import new_id
from art_patch.gate import (
    PREFIX,
    Answered,
    Finding,
    GateConfig,
    Given,
    HeldOut,
    Judged,
    Turn,
    Verdict,
    answered_in,
    collapse_findings,
    contest,
    data_hash,
    decide,
    failed_runs,
    held_out_turns,
    new_users,
    not_worse,
    with_findings,
)
from art_patch.pipeline.asking import answer_again
from art_patch.pipeline.cycle_run import Cycle
from art_patch.pipeline.gate_checks import check_findings, checked_by_side, compared_in
from art_patch.pipeline.gate_scores import Scored, scores_of
from art_patch.pipeline.rerun import Reruns, rerun
from art_patch.promotion import ensure_loaded
from art_patch.types import Policy

_CONCURRENCY = 16


def contest_of(run: Cycle, candidate: Policy, champion: Policy) -> Verdict:
    """Let both answer held-out turns, or run their scenarios again, the judge rank them blind, and the gate decide.

    Raises:
        EngineError: the engine failed, or renders other prompts than those recorded.
        JudgeError: the judge scored nothing in one of the orders.
    """
    gate, checks, seed = run.config.gate, run.config.checks, candidate.step
    held_out = _held_out(run, seed=seed)
    ensure_loaded(run.engine, candidate.name)
    ensure_loaded(run.engine, champion.name)
    reruns = rerun(run, held_out, candidate, champion)
    turns = [turn for turn in held_out.turns if turn.scenario_key not in reruns.keys]
    answers = _ask(run, (*turns, *gate.suite), candidate, champion)
    contests = [(a.turn, *contest(a.turn, a.candidate.choices, a.champion.choices, new_id=new_id)) for a in answers]
    compared = compared_in(answers, reruns.repeated)
    checked = checked_by_side(compared, checks)
    scored = scores_of(run, contests, reruns.repeated, [score for side in checked for score in side.scores])
    judged = replace(scored.judged, unscored=(*scored.judged.unscored, *(turn.scenario_key for turn in reruns.lost)))
    verdict = decide([pair for pair in judged.pairs if not pair[0].startswith(PREFIX)], gate, seed=seed)
    findings = (
        *_unscored(judged, reruns, gate),
        *_suite(judged, gate, seed),
        *collapse_findings(
            (*answers, *map(answered_in, reruns.repeated)), gate, kl_nats=_kl_nats(candidate), seed=seed
        ),
        *failed_runs(reruns.repeated, gate),
        *check_findings(compared, checked, checks, gate, seed=seed),
    )
    verdict = with_findings(verdict, findings)
    asked = (*(a.turn for a in answers), *(one.turn for one in reruns.repeated), *reruns.lost)
    metrics = _counts(asked, held_out, judged, scored, gate) | dict(verdict.metrics)
    if reruns.metrics is not None:
        metrics["reruns"] = dict(reruns.metrics) | ({"largest_reward": scored.largest} if scored.largest > 1 else {})
    metrics["checks"] = [asdict(finding) for finding in findings]
    run.metrics["gate"] = metrics
    return replace(verdict, reason=_reason(verdict, held_out), metrics=metrics)


def _held_out(run: Cycle, *, seed: int) -> HeldOut:
    """What traffic asks: held-out turns, none of users who just arrived, not too many of one."""
    gate = run.config.gate
    groups = run.store.read.groups(state="formed", held_out=True)
    users = {t.info.user_id for group in groups for t in group.trajectories if t.info.user_id is not None}
    since, came = run.store.read.arrivals(sorted(users))
    new = frozenset[str]()
    if since is not None:
        new = new_users(came, project_since=since, new_user_s=gate.new_user_s, now=run.now)
    return held_out_turns(
        groups,
        scenarios=gate.max_scenarios,
        turns_per_scenario=gate.turns_per_scenario,
        seed=seed,
        without=new,
        max_user_share=gate.max_user_share,
    )


def _ask(run: Cycle, turns: Sequence[Turn], candidate: Policy, champion: Policy) -> list[Answered]:
    """Every turn's answers by both. They take turns in being first, because the second finds a warm cache."""

    def answers_of(policy: Policy, turn: Turn) -> Given:
        answers = answer_again(
            run.engine,
            policy.name,
            turn.call,
            run.config.gate.samples,
            temperature=turn.call.params.get("temperature"),
            logprobs=True,
        )
        return Given(answers.choices, answers.duration_ms)

    def both(place: int, turn: Turn) -> Answered:
        if place % 2:
            theirs = answers_of(champion, turn)
            return Answered(turn, answers_of(candidate, turn), theirs)
        return Answered(turn, answers_of(candidate, turn), answers_of(champion, turn))

    answers: list[Answered] = []
    with ThreadPoolExecutor(_CONCURRENCY) as pool:
        for done, answered in enumerate(pool.map(both, range(len(turns)), turns), 1):
            answers.append(answered)
            run.progress("gate: answers", done, len(turns))
    return answers


def _unscored(judged: Judged, reruns: Reruns, gate: GateConfig) -> tuple[Finding, ...]:
    """What nobody judged may have been the bad ones."""
    asked = len(judged.pairs) + len(judged.unscored)
    share = len(judged.unscored) / asked if asked else 0.0
    words = f"the judge scored {'only ' if judged.unscored else ''}{len(judged.pairs)} of {asked} turns"
    if reruns.repeated or reruns.lost:
        words += f" and runs ({len(reruns.lost)} of the scenarios that were run again were lost)"
    return (Finding("unscored", share, None, gate.max_unscored, share <= gate.max_unscored, words),)


def _suite(judged: Judged, gate: GateConfig, seed: int) -> tuple[Finding, ...]:
    """The judge's scores on the suite, none of which may be missing."""
    if not gate.suite:
        return ()
    if missing := [key for key in judged.unscored if key.startswith(PREFIX)]:
        words = f"suite: {len(missing)} of {len(gate.suite)} prompts have no score"
        return (Finding("suite", None, None, gate.max_worse, False, words),)
    pairs = [pair for pair in judged.pairs if pair[0].startswith(PREFIX)]
    return (not_worse("suite", pairs, allowed=gate.max_worse, level=gate.level, seed=seed),)


def _kl_nats(candidate: Policy) -> float | None:
    """How far training moved it, as it measured itself; a policy made elsewhere may not say."""
    kl_nats: Any = candidate.metrics.get("train", {}).get("kl_nats")
    return float(kl_nats) if isinstance(kl_nats, int | float) else None


def _counts(
    asked: Sequence[Turn], held_out: HeldOut, judged: Judged, scored: Scored, gate: GateConfig
) -> dict[str, Any]:
    judgement = next((judgement for report in scored.reports for judgement in report.judgements), None)
    return {
        "turns": len(asked),
        "suite": len(gate.suite),
        "unscored": len(judged.unscored),
        "left": dict(held_out.left),
        "order_disagreement": judged.order_disagreement,
        "judge": judgement.judge if judgement else None,
        "rubric": judgement.rubric if judgement else None,
        "judge_calls": sum(report.calls for report in scored.reports),
        "data_sha256": data_hash(asked),
        "config": {name: value for name, value in asdict(replace(gate, suite=())).items() if name != "suite"},
    }


def _reason(verdict: Verdict, held_out: HeldOut) -> str:
    if verdict.promote or not held_out.left:
        return verdict.reason
    left = "; ".join(f"{count} {why}" for why, count in held_out.left.items())
    return f"{verdict.reason} (held out but not asked: {left})"
