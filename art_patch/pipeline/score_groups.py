"""The steps `group` and `score`: form groups of finished trajectories; rewards come from checks and from the judge."""

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from art_patch import grouping, rewards
from art_patch._lib.ids import new_id
from art_patch.pipeline.cycle_run import CycleConfig, Run
from art_patch.store import Store
from art_patch.trajectories import as_run
from art_patch.types import Group, Score, Trajectory


def form(
    pending: Sequence[Trajectory], config: CycleConfig, store: Store, new_id: Callable[[], str]
) -> grouping.Grouping:
    """Return the groups that a cycle would form of `pending` (ungrouped runs, oldest first), without writing them."""
    return grouping.form_groups(
        pending,
        new_id=new_id,
        min_size=config.min_group_size,
        max_size=config.max_group_size,
        holdout_share=config.holdout_share,
        holdout_users=config.holdout_users,
        # Without resampling and replay a run alone can never get siblings, so it needs no group of its own.
        singles=config.resample is not None or config.replay is not None,
        across=config.across,
        # If the embedding endpoint is down, words alone decide, and `Grouping.embeddings` holds the reason.
        embed=config.embed,
        known=store.read.known_scenarios,
    )


def group(run: Run, ended: Sequence[str] = ()) -> grouping.Grouping:
    """Form groups of all finished trajectories that are in no group, and write the groups to the store.

    `ended` were just replayed, so they are complete already. The metrics are then named `regroup`, not `group`.
    """
    config, store = run.config, run.store
    # First: what was copied of a run before the app said that nothing may be learned from it is not learned from, too.
    store.consent.spread()
    pending = store.read.ungrouped(settled_before=run.now - config.settle_s, ended=ended)
    run.progress("group", 0, len(pending))
    found = form(pending, config, store, new_id)
    # Before the groups: whatever is done with a run, its wording is on one side from now on.
    store.ledger.add_wordings(found.wordings, now=run.now)
    if found.derived:
        store.write([record for its in found.derived for record in (its.info, *its.calls)])
        # A run that was cut into derived trajectories gets a group of its own, or the next cycle would cut it again.
        run_of = {call.id: trajectory for trajectory in pending for call in trajectory.calls}
        sources = {run_of[str(call.shadow_of)].id: its for its in found.derived for call in its.calls[:1]}
        whole = {trajectory.id: trajectory for trajectory in pending}
        taken = [Group(new_id(), f"run:{key}", "single", (whole[key],)) for key in sources]
        store.ledger.add_groups(taken, state="in spans", now=run.now)
    store.ledger.add_groups(found.groups, now=run.now)
    run.progress("group", len(pending), len(pending), f"{len(found.groups)} groups")
    # Reasons for trajectories in no group go into the report: a user who sees no training looks there first.
    run.metrics["regroup" if ended else "group"] = {
        "trajectories": len(pending),
        "groups": len(found.groups),
        "held_out": sum(group.held_out for group in found.groups),
        "left": dict(found.left),
    } | ({"embeddings": found.embeddings} if found.embeddings else {})
    if refused := store.consent.left_out():
        run.metrics["regroup" if ended else "group"]["not_learned_from"] = refused
    return found


def score(run: Run) -> None:
    """Run the user's checks, let the judge rank the groups that lack a reward, and write all scores to the store.

    A group that the judge could not rank waits for the next cycle; one that looks manipulated or biased is quarantined.
    """
    store, config = run.store, run.config
    waiting: Sequence[Group] = store.read.groups(state="formed", held_out=False)
    siblings = (each for group in waiting for each in group.trajectories)
    checked = rewards.run_checks(siblings, config.checks, now=run.now)
    store.write(checked.scores)
    waiting = [rewards.with_scores(group, checked.scores) for group in waiting]
    asked = [group for group in waiting if _needs_judge(run, group)]
    batch = _judge_groups(run, asked) if asked else rewards.JudgedBatch()
    put_aside = {group.id for group in asked} - {score.group_id for score in batch.scores}
    scored = [group for group in waiting if group.id not in put_aside]
    store.write([one for group in scored for one in _combined(run, group, batch.scores)])
    # After the scores: a cycle that is killed in between scores these groups again, and loses none.
    store.ledger.set_groups([group.id for group in scored], "scored")
    metrics: dict[str, Any] = {"groups": len(scored), "unscored": len(batch.unscored)}
    if batch.unscored:
        metrics["reasons"] = dict(Counter(batch.unscored.values()))
    if checked.failures:
        metrics["check_failures"] = dict(checked.failures)
    if run.teacher is not None:
        metrics |= {"teacher": run.teacher.model, "calls": batch.calls, "prompt_tokens": batch.prompt_tokens}
    elif asked:
        metrics |= _judge_metrics(batch)
    run.metrics["score"] = metrics


def ask_first(run: Run, judge: rewards.OrderedJudge | None = None) -> None:
    """Ask the cycle's judge, or another `judge`, one small question, unless that was done in this cycle already.

    Called before the engine samples anything that the judge must score, because it would be sampled for nothing. Of a
    teacher it finds out whether it has the base's tokenizer, with a `ConfigError` if not. Raises `JudgeError` if the
    judge gives no verdict. A budget that is used up is no error: groups that are not judged wait for the next cycle.
    """
    name = "judge" if judge is None else "gate judge"
    if judge is None and run.teacher is not None:
        leader = run.store.ledger.leader()
        run.teacher.require_same_tokens(leader.base if leader else "")
        return
    if name in run.metrics or (judge is None and run.metrics.get("score", {}).get("calls")):
        return
    question = {"role": "user", "content": "What is 2 + 2?"}
    attempts = (as_run(said, [question, {"role": "assistant", "content": said}], (), what=name) for said in ("4", "5"))
    group = Group(new_id(), "", "single", tuple(attempts))
    if not _needs_judge(run, group):
        return
    keep = run.store.ledger.add_judgement
    report = (judge or run.judge).score_groups([group], purpose="first question", on_judgement=keep)
    run.metrics[name] = {"calls": report.calls, "cost_usd": report.cost_usd}


def to_judge(run: Run) -> list[Group]:
    """Return the groups, stored and yet to be formed, that a cycle would send to the judge now; changes nothing."""
    numbers = count()
    pending = run.store.read.ungrouped(settled_before=run.now - run.config.settle_s)
    would_be = form(pending, run.config, run.store, lambda: f"new-{next(numbers)}")
    if would_be.embeddings:
        run.metrics["group"] = {"embeddings": would_be.embeddings}
    formed = run.store.read.groups(state="formed", held_out=False)
    every = (*formed, *(group for group in would_be.groups if not group.held_out))
    return [group for group in every if _needs_judge(run, group)]


def _needs_judge(run: Run, group: Group) -> bool:
    # Scores that the judge gave to this group in a cycle that was killed do not count: the checks for manipulation
    # run over a whole batch, and they had not run yet.
    def unjudged(sibling: Trajectory) -> Trajectory:
        kept = tuple(s for s in sibling.scores if (s.source, s.group_id) != (rewards.SCORE_SOURCE, group.id))
        return replace(sibling, scores=kept)

    plain = replace(group, trajectories=tuple(map(unjudged, group.trajectories)))
    return None in rewards.rewards_G(plain, combination=run.config.combination)


def _judge_groups(run: Run, asked: Sequence[Group]) -> rewards.JudgedBatch:
    """Have the judge rank these groups, and write its scores and the state of groups without scores to the store."""

    def keep(_group: Group, scores: Sequence[Score], _usage: object) -> None:
        # At once: after a kill, the next cycle passes these scores as `known` and does not pay for them twice.
        run.store.write(scores)

    if run.teacher is not None:  # it reads tokens, and no text can talk to it
        report = run.teacher.score_groups(
            asked,
            on_judgement=run.store.ledger.add_judgement,
            progress=lambda done, total: run.progress("score", done, total),
        )
        batch = rewards.JudgedBatch(
            calls=report.calls, prompt_tokens=report.prompt_tokens, cost_usd=None, scores=report.scores,
            unscored=report.unscored,
        )  # fmt: skip
        return _written(run, batch)
    batch = rewards.judge_batch(
        asked,
        run.judge,
        run.config.defence,
        # Unpredictable: the seed selects the groups that get a planted answer or a second pass.
        seed=secrets.randbits(63),
        known=[score for group in asked for sibling in group.trajectories for score in sibling.scores],
        on_scored=keep,
        on_judgement=run.store.ledger.add_judgement,
        progress=lambda done, total: run.progress("score", done, total),
    )
    return _written(run, batch)


def _written(run: Run, batch: rewards.JudgedBatch) -> rewards.JudgedBatch:
    run.store.write(batch.scores)
    for group_id, reason in batch.unscored.items():
        run.store.ledger.set_groups([group_id], "formed", reason=reason)
    for group_id, reason in batch.quarantined.items():
        run.store.ledger.set_groups([group_id], "quarantined", reason=reason)
    return batch


def _combined(run: Run, group: Group, scores: Sequence[Score]) -> Sequence[Score]:
    ours = [score for score in scores if score.group_id == group.id]
    return rewards.kept_scores(group, ours, combination=run.config.combination, now=run.now)


def _judge_metrics(batch: rewards.JudgedBatch) -> dict[str, object]:
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
