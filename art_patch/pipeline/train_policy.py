"""The step `train`: trains a candidate on scored groups, publishes it, and adds it to the ledger.

If an earlier update was killed, it is continued before anything else is trained. Its groups are still in the state
`scored`, and its checkpoint keeps the training steps that were finished.
"""

from __future__ import annotations

import math
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

# The module, not its names: they load at first use, and a cycle that trains nothing must not need numpy or torch.
from art_patch import training
from art_patch._lib.version import __version__
from art_patch.errors import ArtPatchError, TrainingError
from art_patch.pipeline import base_check, carry_over, lineage, taught, train_given
from art_patch.pipeline.cycle_run import Cycle
from art_patch.rewards import noise_of_judges, reward_noise, rewards_G
from art_patch.types import JSON, Group, Policy, TrainedRow, Trajectory

_WITHIN_NOISE = "the rewards of the siblings differ no more than the judge disagrees with itself"
_TEACHER = "teacher"  # in an update's metrics: the model that it learns from in place of rewards
_EVALUATED = 64  # groups; each is computed once per evaluation
_Rows: TypeAlias = "tuple[tuple[training.Row, ...], training.RowsReport]"


def check_can_train(run: Cycle, champion: Policy) -> None:
    """Raise a `ConfigError` or `ModelNotFound` if training would fail later on, before the judge costs money.

    A package, a GPU or the chat template may be missing, or the engine may be unable to serve this base's LoRA.
    """
    config = run.config.train
    base_check.check_base(champion.base, has_template=True, closely=False)
    training.require_packages()
    if run.teacher is not None:
        run.teacher.require_same_tokens(champion.base)
    if config.backend == "unsloth" or config.processes > 1:
        training.require_machine(config)
    if config.imitate_from is not None or config.prefer_from is not None:
        train_given.base_text(champion.base, ()).renderer()
    # A champion with an adapter has proven that the engine serves a LoRA of these modules.
    if champion.path is None or config.start == "base":
        training.require_servable(champion.base)


def train(run: Cycle, champion: Policy) -> tuple[Policy | None, str]:
    """Train a candidate on scored groups, or return `None` and why not; `TrainingError` if it failed, unpublished."""
    start = _start(run, champion)
    if (job := _unfinished_job(run, champion, start)) is not None:
        run.metrics["train"] = {**job.metrics, "resumed": True}
        return run_job(run, champion, job), ""
    groups, evaluation = run.store.read.groups(state="scored", held_out=False), list[Group]()
    if (reason := _why_wait(run, groups)) is not None:
        return None, reason
    if run.config.train.eval_steps is not None:
        # The newest ones. They are never learned from.
        evaluation = run.store.read.groups(state="formed", held_out=True, limit=_EVALUATED)
    return train_groups(run, champion, groups, start=start, evaluation=evaluation)


def train_groups(
    run: Cycle, champion: Policy, groups: Sequence[Group], *,
    start: Policy | None = None, evaluation: Sequence[Group] = (),
) -> tuple[Policy | None, str]:  # fmt: skip
    """Train like `train`, on these scored groups; `evaluation`: groups on which the update only measures itself."""
    start = start or _start(run, champion)
    # The name is taken before the update, so that a killed update and its continuation have one name.
    target = run.adapters / f"{champion.model}@{next_step(run, champion)}"
    job = make_job(run, champion, groups, target, start=start, evaluation=evaluation)
    if job is None:
        return None, "no group teaches anything: every group was scored alike, or is too old or not exact"
    return run_job(run, champion, job), ""


def _start(run: Cycle, champion: Policy) -> Policy:
    """Return the policy that the update starts from; the groups of candidates that are given up may be used again."""
    start, given_up = carry_over.start_of(run.store.ledger.policies(), champion, run.config.train.start)
    # The newest first: one from which another goes on is not given up before that other.
    for each in reversed(given_up):
        run.store.ledger.give_up(each.name)
    return start


def run_job(run: Cycle, champion: Policy, job: training.TrainJob) -> Policy:
    """Make the update and add its policy to the ledger as a candidate."""
    directory = run.adapters.parent / "training" / job.target.name
    began, key = time.monotonic(), job.fingerprint[:16]
    try:
        metrics = training.run_job(job, directory, progress=partial(run.progress, "train"))
    except BaseException as error:
        # Also after Ctrl-C: the GPU time was spent, and `art-patch report` counts its cost.
        took_s, why = time.monotonic() - began, type(error).__name__.lstrip("_")
        # A store that fails here must not hide the error that ended the update.
        with suppress(ArtPatchError):
            run.store.ledger.note_attempt(key, policy=job.target.name, took_s=took_s, why=why, who=run.who)
            # An update that was dropped, as its files were, would be dropped in every later cycle, too. If it continued
            # a candidate, the next one starts elsewhere: all that the champion answers may be too far from this one.
            if isinstance(error, TrainingError) and not directory.exists():
                run.store.ledger.give_up(run.metrics["train"]["start"])
        raise
    run.metrics["train"] |= asdict(metrics) | {
        "config": asdict(job.config), "job": key, "took_s": time.monotonic() - began,
    }  # fmt: skip
    candidate = replace(
        champion,
        name=job.target.name,
        state="candidate",
        created_at=time.time(),
        path=str(job.target),
        # One that begins anew is tested against the champion, too.
        parent=champion.name if job.config.start == "base" else run.metrics["train"]["start"],
        metrics={
            "train": run.metrics["train"],
            "made": {"art_patch": __version__, "judges": job.lineage.get("judges", [])},
        },
    )
    near = training.near_job(job, directory)
    left = {group.id for group, rest in zip(job.groups, near.groups, strict=True) if group.teaches > rest.teaches}
    kept = [key for key in job.group_ids if key not in left]
    rows = _trained_rows(run, near)
    files = ", ".join(job.metrics.get("files", ()))
    run.store.ledger.add_candidate(
        candidate, trained_on=kept, also=job.others, rows=rows, who=run.who,
        reason=f"trained on {files}" if files else None,
    )  # fmt: skip
    # Those far from a candidate that is continued may be near the champion, from which a later update starts.
    if left and candidate.parent == champion.name:
        far = f"sampled by a policy more than {job.config.max_drift_nats} nats from where the update started"
        run.store.ledger.set_groups(sorted(left), "stale", reason=far)
    # Last: until the ledger knows the policy, the job is all that a later cycle could continue from.
    shutil.rmtree(directory)
    return candidate


def _trained_rows(run: Cycle, job: training.TrainJob) -> tuple[TrainedRow, ...]:
    """Return the answers that this job's update trains on, each with its advantage and weight."""
    # Read from the store again: the job holds rows of token ids, and not the calls and choices that they come from.
    config, found = job.config, list[TrainedRow]()
    for group, lesson in zip((group for group in job.groups if group.teaches), job.lessons, strict=True):
        siblings = {each.trajectory_id: each.example for each in group.siblings if each.example.rows}
        anchors = training.Anchors(list(siblings.values()), config.anchor_weight)
        for trajectory in run.store.read.trajectories(list(siblings)):
            answers = training.trained_answers(
                trajectory, max_tokens=config.max_tokens, learn_truncated=config.learn_truncated
            )
            prompts = {call.id: call.prompt_token_ids or () for call in trajectory.calls}
            for call, choice in answers:
                advantage = anchors.of_turn(siblings[trajectory.id].advantage, prompts[call])
                found.append(TrainedRow(call, choice, trajectory.id, group.id, advantage, lesson.weight))
    return tuple(found)


def _why_wait(run: Cycle, groups: Sequence[Group]) -> str | None:
    """Return why no update is made yet; the groups wait for more traffic."""
    config = run.config
    if len(groups) < config.min_groups:
        left: dict[str, int] = run.metrics["group"]["left"]
        why = "; ".join(f"{count} trajectories: {reason}" for reason, count in left.items())
        return f"{len(groups)} scored groups, {config.min_groups} are needed" + (f" ({why})" if why else "")
    # A candidate that the gate could not test would be rejected, and its training wasted.
    untestable = why_untestable(run)
    return None if untestable is None else f"{untestable}; the groups wait for more"


def why_untestable(run: Cycle) -> str | None:
    """Return why a gate could not test a candidate yet, for lack of held-out scenarios; `None` if it could."""
    held_out = {group.scenario_key for group in run.store.read.groups(state="formed", held_out=True)}
    if len(held_out) >= (needed := run.config.gate.min_scenarios):
        return None
    return f"{len(held_out)} held-out scenarios, {needed} are needed to test a candidate"


def next_step(run: Cycle, champion: Policy) -> int:
    """Return the step of the next policy of the champion's agent."""
    # Engines cache adapters by name, so a name is never used twice, not even that of a deleted policy.
    taken = [p.step for p in run.store.ledger.policies() if p.model == champion.model]
    taken += [int(d.name.rpartition("@")[2]) for d in run.adapters.glob(f"{champion.model}@*") if d.is_dir()]
    return max(taken) + 1


def _unfinished_job(run: Cycle, champion: Policy, start: Policy) -> training.TrainJob | None:
    """Return the job of a killed update if it would come out the same now; discard every other job."""
    known = {policy.name for policy in run.store.ledger.policies()}
    for directory in carry_over.unfinished_jobs(run.adapters.parent):
        with suppress(TrainingError):
            job = training.read_job(directory)
            if job is not None and _still_holds(job, run, champion, start):
                return job
        carry_over.discard_jobs([directory], run.adapters, known)
    return None


def _still_holds(job: training.TrainJob, run: Cycle, champion: Policy, start: Policy) -> bool:
    # An erasure, a withdrawal, another champion or another configuration since the kill would make another policy.
    waiting = run.store.read.group_ids(state="scored", held_out=False, limit=1_000_000)
    also = job.evaluated_ids | set(job.others)
    there = {each.id for group in run.store.read.groups_of(job.group_ids) for each in group.trajectories}
    return (
        (job.base, job.base_sha256) == (champion.base, champion.base_sha256)
        and (job.parent, job.champion) == (adapter_of(start), adapter_of(champion))
        and job.config == run.config.train
        and job.metrics.get(_TEACHER) == (run.teacher and run.teacher.model)
        and job.target.parent == run.adapters
        and set(job.group_ids) <= set(waiting)
        and job.trajectory_ids <= there
        and also <= run.store.consent.learned_from(sorted(also))
    )


def make_job(
    run: Cycle, champion: Policy, groups: Sequence[Group], target: Path, *,
    start: Policy | None = None, evaluation: Sequence[Group] = (),
) -> training.TrainJob | None:  # fmt: skip
    """Return all inputs of an update that publishes `target`; `None` if there is nothing to learn.

    The update begins at `start`, by default at the champion. Groups from which nothing can be learned get the state
    `dead` or `stale`, so that no later update considers them.
    """
    config, start = run.config.train, start or champion
    rewards_of_groups = [rewards_G(group, combination=run.config.combination) for group in groups]
    rewards = [reward for of_group in rewards_of_groups for reward in of_group if reward is not None]
    made = _made(run, champion, start, groups, rewards_of_groups)
    found = [each.group for each in made]
    text = train_given.base_text(champion.base, [each for group in groups for each in group.trajectories])
    also = train_given.given_rows(run, start, text, list(zip(groups, rewards_of_groups, strict=True)))
    rehearsal, of_rehearsal, rehearsal_metrics = train_given.rehearsal_rows(run, champion)
    evaluated = [] if config.eval_steps is None else _evaluated(run, champion, start, evaluation)
    put_aside = {each.group.id: each.put_aside for each in made if each.put_aside is not None}
    mean_reward = sum(rewards) / len(rewards) if rewards else None
    run.metrics["train"] = {
        "start": start.name,
        **({} if run.teacher is None else {_TEACHER: run.teacher.model}),
        **({} if (left := base_check.untrained(champion.base)) is None else {"untrained": left}),
        "groups": len(groups),
        "dead_groups": sum(state == "dead" for state, _ in put_aside.values()),
        "within_noise": sum(reason == _WITHIN_NOISE for _, reason in put_aside.values()),
        "reward_noise": max((each.noise for each in made), default=0.0),
        "mean_reward": mean_reward,
        "rows": asdict(sum((each.report for each in made), training.RowsReport())),
        "round_trips": train_given.round_trip_metrics(run, text),
        **also.metrics,
        **rehearsal_metrics,
        **({} if config.eval_steps is None else {"evaluation": _evaluation_metrics(evaluated)}),
    }
    # With demonstrations or pairs, a group without a difference in reward may have given one of them. It is kept.
    if not also.demonstrations and not also.pairs:
        for key, (state, reason) in put_aside.items():
            run.store.ledger.set_groups([key], state, reason=reason)
        found = [group for group in found if group.id not in put_aside]
        if not found:
            return None
    job = training.TrainJob(
        base=champion.base,
        base_sha256=champion.base_sha256,
        parent=adapter_of(start),
        champion=adapter_of(champion),
        target=target,
        config=config,
        groups=tuple(found),
        demonstrations=also.demonstrations,
        pairs=also.pairs,
        rehearsal=rehearsal,
        evaluation=tuple(group for group, why in evaluated if not why),
        others=(*also.others, *of_rehearsal),
        mean_reward=mean_reward,
        metrics=run.metrics["train"],
    )
    return replace(job, lineage=lineage.origin(run, champion, start, groups, job))


class _Made(NamedTuple):
    """A group in the form that an update takes. `put_aside`: the state and reason of a group that teaches nothing."""

    group: training.TrainGroup
    report: training.RowsReport
    put_aside: tuple[str, str] | None
    noise: float  # standard deviation of the judge's error in a reward of the group; 0 if it is not known


def _made(
    run: Cycle, champion: Policy, start: Policy, groups: Sequence[Group],
    rewards_of_groups: Sequence[Sequence[float | None]],
) -> list[_Made]:  # fmt: skip
    config, judges = run.config.train, noise_of_judges(run.store.evidence.second_passes())
    noise = [reward_noise(group, judges, combination=run.config.combination) for group in groups]
    kinds: list[training.GroupKind] = ["turn" if group.how == "resampled" else "run" for group in groups]
    distances = carry_over.distances_to(champion, run.store.ledger.policies())
    of_siblings = [[_rows(each, distances, config) for each in group.trajectories] for group in groups]
    if run.teacher is not None:
        of_siblings = _taught(run.teacher, of_siblings)
    # Siblings without rows, such as upstream's answer, do not enter the mean. They would push all trained siblings up
    # or down together, whatever the difference between these is.
    trained = [
        [reward if rows else None for reward, (rows, _) in zip(rewards, siblings, strict=True)]
        for rewards, siblings in zip(rewards_of_groups, of_siblings, strict=True)
    ]
    of_groups = training.advantages_of_groups(trained, config.advantage_scale, noise=noise, kinds=kinds)
    if run.teacher is not None:  # of a run for people; each token is learned by its own
        of_groups = tuple(
            tuple(taught.nearness_nats(rows) if rows else 0.0 for rows, _ in siblings)
            if any(rows for rows, _ in siblings)
            else None
            for siblings in of_siblings
        )
    made: list[_Made] = []
    each_group = zip(groups, kinds, of_siblings, trained, noise, of_groups, strict=True)
    for group, kind, siblings, rewards, error, advantages in each_group:
        report = sum((its for _, its in siblings), training.RowsReport())
        examples = [
            training.Example(rows, advantage)
            for (rows, _), advantage in zip(siblings, advantages or (0.0,) * len(siblings), strict=True)
        ]
        on_policy = (all(call.policy == start.name for call in each.calls) for each in group.trajectories)
        found = tuple(map(training.Sibling, (each.id for each in group.trajectories), examples, on_policy))
        why = _why_silent(rewards, siblings) if advantages is None else None
        made.append(_Made(training.TrainGroup(group.id, found, kind), report, why, error))
    return made


def _rows(trajectory: Trajectory, distances: Mapping[str, int], config: training.TrainConfig) -> _Rows:
    for call in trajectory.calls:
        sampled = call.untrainable is None and call.policy is not None
        # One call by an old policy makes the whole run stale: its later calls follow from that answer.
        if sampled and distances.get(call.policy or "", math.inf) > config.max_staleness:
            why = f"not sampled within {config.max_staleness} steps of the champion"
            return (), training.RowsReport(left_out={why: len(trajectory.calls)})
    return training.rows_and_report(trajectory, max_tokens=config.max_tokens, learn_truncated=config.learn_truncated)


def _taught(teacher: taught.TeacherJudge, of_siblings: Sequence[Sequence[_Rows]]) -> list[list[_Rows]]:
    """Return the rows of each sibling with what the teacher says of them; those that it refuses are left out."""
    answers = teacher.teach([row for siblings in of_siblings for rows, _ in siblings for row in rows])

    def heard(rows: Sequence[training.Row], report: training.RowsReport) -> _Rows:
        found = [next(answers) for _ in rows]
        refused = Counter(each for each in found if isinstance(each, str))
        kept = tuple(each for each in found if not isinstance(each, str))
        return kept, report + training.RowsReport(left_out=refused)

    return [[heard(*sibling) for sibling in siblings] for siblings in of_siblings]


def _evaluated(
    run: Cycle, champion: Policy, start: Policy, groups: Sequence[Group]
) -> list[tuple[training.TrainGroup, str]]:
    """Return the groups for the evaluation, each with the reason why it cannot be used, or an empty text."""
    rewards_of_groups = [rewards_G(group, combination=run.config.combination) for group in groups]
    made = _made(run, champion, start, groups, rewards_of_groups)
    return [(each.group, "" if each.put_aside is None else each.put_aside[1]) for each in made]


def _evaluation_metrics(evaluated: Sequence[tuple[training.TrainGroup, str]]) -> JSON:
    if not evaluated:
        return {"groups": 0, "why": "there is no group to evaluate on"}
    left_out = Counter(why for _, why in evaluated if why)
    return {"groups": len(evaluated) - left_out.total(), "left_out": dict(left_out)}


def _why_silent(trained: Sequence[float | None], siblings: Sequence[_Rows]) -> tuple[str, str]:
    """Return the state and reason of a group without advantages: alike rewards, or fewer than two trained siblings."""
    scored = [reward for reward in trained if reward is not None and math.isfinite(reward)]
    if len(scored) > 1:
        alike = max(scored) - min(scored) < training.TOLERANCE
        return "dead", "all siblings that are trained were scored alike" if alike else _WITHIN_NOISE
    if all(rows for rows, _ in siblings):
        return "dead", "not scored"
    left_out = sum((Counter(report.left_out) for rows, report in siblings if not rows), Counter[str]())
    return "stale", max(left_out, key=lambda reason: left_out[reason], default="longer than max_tokens")


def adapter_of(champion: Policy) -> Path | None:
    """Return the directory of a policy's adapter; `None` for the base model."""
    return Path(champion.path) if champion.path else None
