"""Scored groups -> what an update is given; and the update that a killed cycle left behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from art_patch.errors import TrainingError
from art_patch.records import JSON, Group, Policy, Trajectory
from art_patch.rewards.combine import rewards_G
from art_patch.stages.run import Cycle
from art_patch.stages.train_given import given
from art_patch.stages.train_rehearsal import rehearsal
from art_patch.stages.train_text import base_text, round_trip_figures
from art_patch.stages.unfinished import discard
from art_patch.training import TrainConfig
from art_patch.training.advantages import advantages_of_groups
from art_patch.training.job import Sibling, TrainGroup, TrainJob, read_job
from art_patch.training.packing import Example
from art_patch.training.rows import RowsReport, rows_and_report


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
    made: list[tuple[TrainGroup, RowsReport]] = [
        _group(group, advantages or (0.0,) * len(group.trajectories), champion, config)
        for group, advantages in zip(
            groups, advantages_of_groups(rewards_of_groups, config.advantage_scale), strict=True
        )
    ]
    found = [group for group, _ in made]
    text = base_text(champion.base, [each for group in groups for each in group.trajectories])
    also = given(run, champion, text, list(zip(groups, rewards_of_groups, strict=True)))
    again = rehearsal(run, champion)
    evaluated = _evaluated(run, champion, evaluation)
    alike = [group.id for group in found if not any(sibling.example.advantage for sibling in group.siblings)]
    silent = [(group.id, report) for group, report in made if not group.teaches and group.id not in alike]
    mean_reward = sum(rewards) / len(rewards) if rewards else None
    run.figures["train"] = {
        "groups": len(groups),
        "dead_groups": len(alike),
        "mean_reward": mean_reward,
        "rows": asdict(sum((report for _, report in made), RowsReport())),
        "round_trips": round_trip_figures(run, text),
        **also.figures,
        **again.figures,
        **({} if config.eval_steps is None else {"evaluation": _evaluation_figures(evaluated)}),
    }
    if not also.demonstrations and not also.pairs:  # else every group may have given some of it
        run.store.ledger.set_groups(alike, "dead", reason="all siblings were scored alike")
        for key, report in silent:
            run.store.ledger.set_groups([key], "stale", reason=_why_silent(report))
        found = [group for group in found if group.teaches]
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
        figures=run.figures["train"],
    )


def _group(
    group: Group, advantages: Sequence[float], champion: Policy, config: TrainConfig
) -> tuple[TrainGroup, RowsReport]:
    start = champion.name if config.start == "champion" else f"{champion.model}@0"
    siblings: list[Sibling] = []
    whole = RowsReport()
    for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
        if _is_fresh(trajectory, champion, config.max_staleness):
            rows, report = rows_and_report(
                trajectory, max_tokens=config.max_tokens, learn_truncated=config.learn_truncated
            )
        else:
            rows, report = (), RowsReport(left_out={_stale(config): len(trajectory.calls)})
        on_policy = all(call.policy == start for call in trajectory.calls)
        siblings.append(Sibling(trajectory.id, Example(rows, advantage), on_policy))
        whole += report
    return TrainGroup(group.id, tuple(siblings)), whole


def _evaluated(run: Cycle, champion: Policy, groups: Sequence[Group]) -> list[tuple[TrainGroup, str]]:
    """What an update can be evaluated on, and why it cannot be of any other group."""
    config = run.config.train
    if config.eval_steps is None:
        return []
    rewards_of_groups = [rewards_G(group, combination=run.config.combination) for group in groups]
    found: list[tuple[TrainGroup, str]] = []
    for group, rewards, advantages in zip(
        groups, rewards_of_groups, advantages_of_groups(rewards_of_groups, config.advantage_scale), strict=True
    ):
        made, report = _group(group, advantages or (0.0,) * len(rewards), champion, config)
        scored = sum(reward is not None for reward in rewards)
        alike = "all siblings were scored alike" if scored > 1 else "not scored"
        why = alike if advantages is None else _why_silent(report)
        found.append((made, "" if made.teaches else why))
    return found


def _evaluation_figures(evaluated: Sequence[tuple[TrainGroup, str]]) -> JSON:
    if not evaluated:
        return {"groups": 0, "why": "there is no group to evaluate on"}
    left_out = Counter(why for _, why in evaluated if why)
    return {"groups": len(evaluated) - left_out.total(), "left_out": dict(left_out)}


def _why_silent(report: RowsReport) -> str:
    """Why a group has nothing that could be trained."""
    return max(report.left_out, key=lambda reason: report.left_out[reason], default="longer than max_tokens")


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
