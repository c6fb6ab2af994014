"""Groups that wait -> scores in the store."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from art_patch.pipeline.cycle_run import Run
from art_patch.pipeline.form_groups import form
from art_patch.rewards import SCORE_SOURCE, JudgedBatch, judge_batch, kept_scores, rewards_G, run_checks, with_scores
from art_patch.types import Group, Score, Trajectory


def score(run: Run) -> None:
    """Run the user's checks, and let the judge rank what has no reward yet.

    A group that could not be ranked waits for the next cycle; one whose scores cannot be trusted is quarantined.
    """
    store, config = run.store, run.config
    waiting: Sequence[Group] = store.read.groups(state="formed", held_out=False)
    checked = run_checks((each for group in waiting for each in group.trajectories), config.checks, now=run.now)
    store.write(checked.scores)
    waiting = [with_scores(group, checked.scores) for group in waiting]
    asked = [group for group in waiting if _needs_judge(run, group)]
    batch = _judged(run, asked) if asked else JudgedBatch()
    put_aside = {group.id for group in asked} - {score.group_id for score in batch.scores}
    scored = [group for group in waiting if group.id not in put_aside]
    store.write([one for group in scored for one in _kept(run, group, batch.scores)])
    store.ledger.set_groups([group.id for group in scored], "scored")
    metrics: dict[str, Any] = {"groups": len(scored), "unscored": len(batch.unscored)}
    if batch.unscored:
        metrics["reasons"] = dict(Counter(batch.unscored.values()))
    if checked.failures:
        metrics["check_failures"] = dict(checked.failures)
    run.metrics["score"] = metrics | (_findings(batch) if asked else {})


def to_judge(run: Run) -> list[Group]:
    """Return the groups that would be put to the judge now; asks no judge and writes nothing.

    Those that are in the store, and those that would be formed of the runs that no group holds. The metric
    `group.embeddings` says why no embedding model was heard, as a cycle's does.
    """
    numbers = count()
    pending = run.store.read.ungrouped(settled_before=run.now - run.config.settle_s)
    would_be = form(pending, run.config, lambda: f"new-{next(numbers)}")
    if would_be.embeddings:
        run.metrics["group"] = {"embeddings": would_be.embeddings}
    formed = run.store.read.groups(state="formed", held_out=False)
    every = (*formed, *(group for group in would_be.groups if not group.held_out))
    return [group for group in every if _needs_judge(run, group)]


def _needs_judge(run: Run, group: Group) -> bool:
    """Users' rewards need no judge; what a judge said in a cycle that was cut short is none: nobody doubted it yet."""
    return None in rewards_G(_unjudged(group), combination=run.config.combination)


def _unjudged(group: Group) -> Group:
    """The group without what a judge said of it."""

    def without(sibling: Trajectory) -> Trajectory:
        kept = tuple(s for s in sibling.scores if (s.source, s.group_id) != (SCORE_SOURCE, group.id))
        return replace(sibling, scores=kept)

    return replace(group, trajectories=tuple(map(without, group.trajectories)))


def _judged(run: Run, asked: Sequence[Group]) -> JudgedBatch:
    """Let the judge rank these groups; everything that came of it is in the store then."""

    def keep(_group: Group, scores: Sequence[Score], _usage: object) -> None:
        run.store.write(scores)  # at once, so that a kill does not cost a second question

    batch = judge_batch(
        asked,
        run.judge,
        run.config.defence,
        seed=secrets.randbits(63),
        known=[score for group in asked for sibling in group.trajectories for score in sibling.scores],
        on_scored=keep,
        on_judgement=run.store.ledger.add_judgement,
        progress=lambda done, total: run.progress("score", done, total),
    )
    run.store.write(batch.scores)
    for group_id, reason in batch.unscored.items():
        run.store.ledger.set_groups([group_id], "formed", reason=reason)
    for group_id, reason in batch.quarantined.items():
        run.store.ledger.set_groups([group_id], "quarantined", reason=reason)
    return batch


def _kept(run: Run, group: Group, scores: Sequence[Score]) -> Sequence[Score]:
    ours = [score for score in scores if score.group_id == group.id]
    return kept_scores(group, ours, combination=run.config.combination, now=run.now)


def _findings(batch: JudgedBatch) -> dict[str, object]:
    planted, caught = batch.planted_answers
    found: dict[str, object] = {"calls": batch.calls, "prompt_tokens": batch.prompt_tokens}
    found |= {"completion_tokens": batch.completion_tokens, "cost_usd": batch.cost_usd}
    found |= {"planted_answers": planted, "planted_answers_caught": caught, "agreement": batch.agreement}
    if batch.quarantined:
        found["quarantined"] = dict(Counter(batch.quarantined.values()))
    if batch.alarms:
        found["alarms"] = list(batch.alarms)
    if batch.capped:
        found["capped"] = len(batch.capped)
    return found | ({"left": batch.left} if batch.left else {})
