"""Scored groups -> what an update is given; and the update that a killed cycle left behind."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from art_patch.errors import TrainingError
from art_patch.pipeline.cycle_run import Cycle
from art_patch.pipeline.train_given import given
from art_patch.pipeline.train_rehearsal import rehearsal
from art_patch.pipeline.train_text import base_text, round_trip_metrics
from art_patch.pipeline.unfinished import discard
from art_patch.rewards import rewards_G
from art_patch.training import (
    Example,
    Row,
    RowsReport,
    Sibling,
    TrainConfig,
    TrainGroup,
    TrainJob,
    advantages_of_groups,
    read_job,
    rows_and_report,
)
from art_patch.types import JSON, Group, Policy, Trajectory


def job_directory(run: Cycle, target: Path) -> Path:
    """Return where an update of this target keeps its job."""
    return run.adapters.parent / "training" / target.name


def unfinished_job(run: Cycle, champion: Policy) -> TrainJob | None:
    """Return the job of an update that was killed, if it can go on as if nothing had happened; discard any other.

    Its champion and config are those of now, and all its runs are still there, waiting to be learned from.
    """
    known = {policy.name for policy in run.store.ledger.policies()}
    for directory in sorted((run.adapters.parent / "training").glob("*@*")):
        try:
            job = read_job(directory)
        except TrainingError:
            job = None
        if job is not None and _still_holds(job, run, champion):
            return job
        discard(directory, run.adapters, known)
    return None


def _still_holds(job: TrainJob, run: Cycle, champion: Policy) -> bool:
    waiting = run.store.read.group_ids(state="scored", held_out=False, limit=1_000_000)
    also = job.evaluated_ids | set(job.others)
    there = {each.id for group in run.store.read.groups_of(job.group_ids) for each in group.trajectories}
    return (
        (job.base, job.base_sha256, job.parent) == (champion.base, champion.base_sha256, _adapter(champion))
        and job.config == run.config.train
        and job.target.parent == run.adapters
        and set(job.group_ids) <= set(waiting)
        and job.trajectory_ids <= there
        and also <= run.store.read.known(sorted(also))
    )


def make_job(
    run: Cycle, champion: Policy, groups: Sequence[Group], target: Path, *, evaluation: Sequence[Group] = ()
) -> TrainJob | None:
    """Return what can be learned of the groups, `None` if nothing; what teaches nothing is put aside for good.

    Args:
        run: the cycle.
        champion: who serves.
        groups: scored.
        target: where the policy is to be published.
        evaluation: groups to evaluate on, if the config asks for it.
    """
    config = run.config.train
    rewards_of_groups = [rewards_G(group, combination=run.config.combination) for group in groups]
    rewards = [reward for of_group in rewards_of_groups for reward in of_group if reward is not None]
    made = _made(groups, rewards_of_groups, champion, config)
    found = [each.group for each in made]
    text = base_text(champion.base, [each for group in groups for each in group.trajectories])
    also = given(run, champion, text, list(zip(groups, rewards_of_groups, strict=True)))
    again = rehearsal(run, champion)
    evaluated = _evaluated(run, champion, evaluation)
    put_aside = {each.group.id: each.put_aside for each in made if each.put_aside is not None}
    mean_reward = sum(rewards) / len(rewards) if rewards else None
    run.metrics["train"] = {
        "groups": len(groups),
        "dead_groups": sum(state == "dead" for state, _ in put_aside.values()),
        "mean_reward": mean_reward,
        "rows": asdict(sum((each.report for each in made), RowsReport())),
        "round_trips": round_trip_metrics(run, text),
        **also.metrics,
        **again.metrics,
        **({} if config.eval_steps is None else {"evaluation": _evaluation_metrics(evaluated)}),
    }
    if not also.demonstrations and not also.pairs:  # else every group may have given some of it
        for key, (state, reason) in put_aside.items():
            run.store.ledger.set_groups([key], state, reason=reason)
        found = [group for group in found if group.id not in put_aside]
    if not found and not also.demonstrations and not also.pairs:
        return None
    return TrainJob(
        base=champion.base,
        base_sha256=champion.base_sha256,
        parent=_adapter(champion),
        target=target,
        config=config,
        groups=tuple(found),
        demonstrations=also.demonstrations,
        pairs=also.pairs,
        rehearsal=again.rows,
        evaluation=tuple(group for group, why in evaluated if not why),
        others=(*also.others, *again.others),
        mean_reward=mean_reward,
        metrics=run.metrics["train"],
    )


class _Made(NamedTuple):
    """A group as an update is given it; one that teaches nothing is put aside in this state, for this reason."""

    group: TrainGroup
    report: RowsReport
    put_aside: tuple[str, str] | None


def _made(
    groups: Sequence[Group], rewards_of_groups: Sequence[Sequence[float | None]], champion: Policy, config: TrainConfig
) -> list[_Made]:
    """What each group gives an update.

    Siblings are compared with those that are trained beside them. Of others, such as upstream's answer, there are no
    rows: in the mean, they would push all that the policy sampled up or down together.
    """
    start = champion.name if config.start == "champion" else f"{champion.model}@0"
    of_siblings = [[_rows(each, champion, config) for each in group.trajectories] for group in groups]
    trained = [
        [reward if rows else None for reward, (rows, _) in zip(rewards, siblings, strict=True)]
        for rewards, siblings in zip(rewards_of_groups, of_siblings, strict=True)
    ]
    of_groups = advantages_of_groups(trained, config.advantage_scale)
    made: list[_Made] = []
    for group, siblings, rewards, advantages in zip(groups, of_siblings, trained, of_groups, strict=True):
        report = sum((its for _, its in siblings), RowsReport())
        examples = [
            Example(rows, advantage)
            for (rows, _), advantage in zip(siblings, advantages or (0.0,) * len(siblings), strict=True)
        ]
        on_policy = (all(call.policy == start for call in each.calls) for each in group.trajectories)
        found = tuple(map(Sibling, (each.id for each in group.trajectories), examples, on_policy))
        why = _why_silent(rewards, siblings) if advantages is None else None
        made.append(_Made(TrainGroup(group.id, found), report, why))
    return made


def _rows(trajectory: Trajectory, champion: Policy, config: TrainConfig) -> tuple[tuple[Row, ...], RowsReport]:
    if _is_fresh(trajectory, champion, config.max_staleness):
        return rows_and_report(trajectory, max_tokens=config.max_tokens, learn_truncated=config.learn_truncated)
    return (), RowsReport(left_out={_stale(config): len(trajectory.calls)})


def _evaluated(run: Cycle, champion: Policy, groups: Sequence[Group]) -> list[tuple[TrainGroup, str]]:
    """What an update can be evaluated on, and why it cannot be of any other group."""
    config = run.config.train
    if config.eval_steps is None:
        return []
    rewards_of_groups = [rewards_G(group, combination=run.config.combination) for group in groups]
    made = _made(groups, rewards_of_groups, champion, config)
    return [(each.group, "" if each.put_aside is None else each.put_aside[1]) for each in made]


def _evaluation_metrics(evaluated: Sequence[tuple[TrainGroup, str]]) -> JSON:
    if not evaluated:
        return {"groups": 0, "why": "there is no group to evaluate on"}
    left_out = Counter(why for _, why in evaluated if why)
    return {"groups": len(evaluated) - left_out.total(), "left_out": dict(left_out)}


def _why_silent(
    trained: Sequence[float | None], siblings: Sequence[tuple[Sequence[Row], RowsReport]]
) -> tuple[str, str]:
    """The state of a group that teaches nothing, and why: fewer than two siblings to compare, or no difference."""
    if sum(reward is not None and math.isfinite(reward) for reward in trained) > 1:
        return "dead", "all siblings that are trained were scored alike"
    if all(rows for rows, _ in siblings):
        return "dead", "not scored"
    left_out = sum((Counter(report.left_out) for rows, report in siblings if not rows), Counter[str]())
    return "stale", max(left_out, key=lambda reason: left_out[reason], default="longer than max_tokens")


def _stale(config: TrainConfig) -> str:
    return f"not sampled within {config.max_staleness} steps of the champion"


def _is_fresh(trajectory: Trajectory, champion: Policy, max_staleness: int) -> bool:
    """Whether every trainable call was sampled by a policy of this model, at most so many steps ago."""
    for call in trajectory.calls:
        if call.untrainable is None and call.policy is not None:
            model, _, step = call.policy.rpartition("@")
            if model != champion.model or champion.step - int(step) > max_staleness:
                return False
    return True


def _adapter(champion: Policy) -> Path | None:
    return Path(champion.path) if champion.path else None
