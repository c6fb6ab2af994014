"""One update: base model + LoRA + what is to be learned -> a new, published LoRA.

Reads like the loop it is: load, score everything once as the policy at the start, then for each step of the plan
forward, loss, backward, clip, step, and now and then evaluate; then publish by rename. Killed at any moment, it goes
on from its last checkpoint when it is called again with the same job and directory, and gives the same weights.
Anything not finite drops the update; nothing is published then.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch  # with transformers it takes seconds: import this module only to train

from art_patch.errors import AdapterRejected, TrainingError
from art_patch.training.data.packing import Example
from art_patch.training.kernels.dropout import dropout_on
from art_patch.training.kernels.scoring import Scorer
from art_patch.training.loop.backend import load
from art_patch.training.loop.checkpoint import Course, Keeper, read_course
from art_patch.training.loop.evaluation import Evaluation
from art_patch.training.loop.gradients import Gradient, gradients_of
from art_patch.training.loop.guards import why_broken, why_stop
from art_patch.training.loop.job import TrainJob, claim
from art_patch.training.loop.learner import Learner
from art_patch.training.loop.loading import default_device
from art_patch.training.loop.metrics import UpdateMetrics, step_figures, update_metrics
from art_patch.training.loop.notes import Notes, Progress, silently
from art_patch.training.loop.plan import PhaseName, Step, evaluated_of, plan_of
from art_patch.training.loop.publish import is_published, publish
from art_patch.training.loop.ranks import ALONE, Ranks
from art_patch.training.loop.start_scores import start_scores
from art_patch.training.loop.tensor_file import Arrays


def update(job: TrainJob, directory: Path, *, progress: Progress = silently, ranks: Ranks = ALONE) -> UpdateMetrics:
    """Train and publish one policy, or go on doing so.

    Args:
        job: all that the policy depends on.
        directory: the job's own, for what is kept on the way; whoever has the policy may delete it.
        progress: told what goes on.
        ranks: of this process among those that do the same.

    Raises:
        TrainingError: there is nothing to learn, a step is not finite or the first one already too far, or the
            directory belongs to another job or cannot be written.
        AdapterRejected: the target exists.
        ConfigError: the backend cannot be had on this machine.
    """
    plan = plan_of(job)
    if not plan:
        raise TrainingError("no recorded token has an advantage: every group was scored alike, or none is trainable")
    published = is_published(job)
    if ranks.first:
        claim(directory, job)
    course, kept = read_course(directory)
    if published and not course.done:
        raise AdapterRejected(
            f"{job.target} was made of this very job, whose directory is gone; there is nothing to do"
        )
    if not published:
        progress(course.done, len(plan), "loading the base model")
        bench = _set_up(job, directory, course, kept, ranks)
        keeper = Keeper(directory, job.config.checkpoint_every_s, job.config.save_steps)
        note = Notes(job, len(plan) - course.done)
        while course.done < len(plan) and course.stopped is None:
            step = plan[course.done]
            _take(step, bench, course, directory)
            _evaluate(bench, course, at_the_end=course.done == len(plan) or course.stopped is not None)
            if ranks.first:
                keeper.keep(course, bench.learner, now=step.last or course.stopped is not None)
            progress(course.done, len(plan), note(course))
        if ranks.first:
            publish(job, bench.model, bench.scorer)
    return update_metrics(
        job, course.history, stopped=course.stopped, gap_nats=course.gap_nats, why_not_shared=course.why_not_shared
    )


@dataclass(frozen=True, slots=True)
class _Bench:
    """What steps are taken with."""

    job: TrainJob
    model: Any
    scorer: Scorer
    learner: Learner
    gradients: Mapping[PhaseName | Literal["rehearse"], Gradient]
    evaluation: Evaluation
    ranks: Ranks


def _set_up(job: TrainJob, directory: Path, course: Course, kept: Arrays, ranks: Ranks) -> _Bench:
    """Load the policy at the start, let it say what it thinks of the data, and bring it to where the course is."""
    model = load(job, default_device(ranks.rank))
    scorer = Scorer(model)
    evaluated = [example for lesson in evaluated_of(job) for example in lesson.examples]
    scorer.prove([*(Example((row,)) for row in job.rows), *evaluated])
    start = start_scores(job, model, scorer, directory, ranks)
    course.gap_nats, course.why_not_shared = start.gap_nats, scorer.why_apart
    learner = Learner(model, job.config)
    learner.restore(kept)
    gradients, evaluation = gradients_of(job, scorer, start, ranks), Evaluation(job, scorer, start, ranks)
    return _Bench(job, model, scorer, learner, gradients, evaluation, ranks)


def _take(step: Step, bench: _Bench, course: Course, directory: Path) -> None:
    """Take a step and note it in the course, or note there why not."""
    began = time.monotonic()
    with dropout_on(bench.model, bench.job.config, course.done, bench.ranks):
        sums = _of_all(bench.gradients[step.phase](step.items), bench)
        rehearsed = _of_all(bench.gradients["rehearse"](step.rehearsed), bench)
    figures = step_figures(step, sums, rehearsed)
    figures["grad_norm"] = bench.learner.clip(bench.ranks)
    broken = why_broken(figures)
    if broken is None:
        course.stopped = why_stop(figures, bench.job.config)
        if course.stopped is None:
            figures["weight_norm"] = bench.learner.step(step.number)
            broken = why_broken(figures)
    nothing_learned = course.stopped is not None and not course.done
    if broken or nothing_learned:
        _drop(directory, bench.ranks)
        cure = "lower --learning-rate, or look for absurd rewards" if broken else "raise that bound, or use newer runs"
        raise TrainingError(
            f"{broken or course.stopped} at step {course.done + 1} ({step.phase}): the update was dropped and nothing "
            f"published; {cure}"
        )
    if course.stopped is None:
        figures["seconds"] = time.monotonic() - began
        figures["tokens_per_s"] = figures["computed_tokens"] / figures["seconds"]
        course.history.append(figures)
        course.done += 1


def _evaluate(bench: _Bench, course: Course, *, at_the_end: bool) -> None:
    """Note in the last step's figures what the policy makes of other groups, if it is time and not there yet."""
    every = bench.job.config.eval_steps
    if every is None or "eval_loss" in course.history[-1]:
        return
    if at_the_end or course.done % every == 0:
        course.history[-1] |= bench.evaluation.figures()


def _of_all(sums: Mapping[str, float], bench: _Bench) -> dict[str, float]:
    """The sums over all processes."""
    values = torch.tensor(list(sums.values()), dtype=torch.float64, device=bench.scorer.device)
    return dict(zip(sums, bench.ranks.sum(values).tolist(), strict=True))


def _drop(directory: Path, ranks: Ranks) -> None:
    """Nobody is to go on from what is broken."""
    if ranks.first:
        shutil.rmtree(directory)
