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
from art_patch.training.kernels.lora_layers import dropout_on
from art_patch.training.kernels.scoring import Scorer
from art_patch.training.loop.backend import load
from art_patch.training.loop.checkpoint import CheckpointWriter, TrainState, read_train_state
from art_patch.training.loop.evaluation import Evaluation
from art_patch.training.loop.gradients import Gradient, gradients_of
from art_patch.training.loop.guards import why_broken, why_stop
from art_patch.training.loop.job import TrainJob, claim
from art_patch.training.loop.learner import Learner
from art_patch.training.loop.loading import default_device
from art_patch.training.loop.metrics import UpdateMetrics, step_metrics, update_metrics
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
    train_state, kept = read_train_state(directory)
    if published and not train_state.done:
        raise AdapterRejected(
            f"{job.target} was made of this very job, whose directory is gone; there is nothing to do"
        )
    if not published:
        progress(train_state.done, len(plan), "loading the base model")
        train_context = _set_up(job, directory, train_state, kept, ranks)
        checkpoint_writer = CheckpointWriter(directory, job.config.checkpoint_every_s, job.config.save_steps)
        note = Notes(job, len(plan) - train_state.done)
        while train_state.done < len(plan) and train_state.stopped is None:
            step = plan[train_state.done]
            _take(step, train_context, train_state, directory)
            _evaluate(
                train_context, train_state, at_the_end=train_state.done == len(plan) or train_state.stopped is not None
            )
            if ranks.first:
                checkpoint_writer.keep(
                    train_state, train_context.learner, now=step.last or train_state.stopped is not None
                )
            progress(train_state.done, len(plan), note(train_state))
        if ranks.first:
            publish(job, train_context.model, train_context.scorer)
    return update_metrics(
        job,
        train_state.history,
        stopped=train_state.stopped,
        gap_nats=train_state.gap_nats,
        why_not_shared=train_state.why_not_shared,
    )


@dataclass(frozen=True, slots=True)
class _TrainContext:
    """What steps are taken with."""

    job: TrainJob
    model: Any
    scorer: Scorer
    learner: Learner
    gradients: Mapping[PhaseName | Literal["rehearse"], Gradient]
    evaluation: Evaluation
    ranks: Ranks


def _set_up(job: TrainJob, directory: Path, train_state: TrainState, kept: Arrays, ranks: Ranks) -> _TrainContext:
    """Load the policy at the start, let it say what it thinks of the data, and bring it to where the train_state is."""
    model = load(job, default_device(ranks.rank))
    scorer = Scorer(model)
    evaluated = [example for lesson in evaluated_of(job) for example in lesson.examples]
    scorer.prove([*(Example((row,)) for row in job.rows), *evaluated])
    start = start_scores(job, model, scorer, directory, ranks)
    train_state.gap_nats, train_state.why_not_shared = start.gap_nats, scorer.why_apart
    learner = Learner(model, job.config)
    learner.restore(kept)
    gradients, evaluation = gradients_of(job, scorer, start, ranks), Evaluation(job, scorer, start, ranks)
    return _TrainContext(job, model, scorer, learner, gradients, evaluation, ranks)


def _take(step: Step, train_context: _TrainContext, train_state: TrainState, directory: Path) -> None:
    """Take a step and note it in the train_state, or note there why not."""
    began = time.monotonic()
    with dropout_on(train_context.model, train_context.job.config, train_state.done, train_context.ranks.rank):
        sums = _of_all(train_context.gradients[step.phase](step.items), train_context)
        rehearsed = _of_all(train_context.gradients["rehearse"](step.rehearsed), train_context)
    metrics = step_metrics(step, sums, rehearsed)
    metrics["grad_norm"] = train_context.learner.clip(train_context.ranks)
    broken = why_broken(metrics)
    if broken is None:
        train_state.stopped = why_stop(metrics, train_context.job.config)
        if train_state.stopped is None:
            metrics["weight_norm"] = train_context.learner.step(step.number)
            broken = why_broken(metrics)
    nothing_learned = train_state.stopped is not None and not train_state.done
    if broken or nothing_learned:
        _drop(directory, train_context.ranks)
        cure = "lower --learning-rate, or look for absurd rewards" if broken else "raise that bound, or use newer runs"
        raise TrainingError(
            f"{broken or train_state.stopped} at step {train_state.done + 1} ({step.phase}): the update was dropped "
            f"and nothing published; {cure}"
        )
    if train_state.stopped is None:
        metrics["seconds"] = time.monotonic() - began
        metrics["tokens_per_s"] = metrics["computed_tokens"] / metrics["seconds"]
        train_state.history.append(metrics)
        train_state.done += 1


def _evaluate(train_context: _TrainContext, train_state: TrainState, *, at_the_end: bool) -> None:
    """Note in the last step's metrics what the policy makes of other groups, if it is time and not there yet."""
    every = train_context.job.config.eval_steps
    if every is None or "eval_loss" in train_state.history[-1]:
        return
    if at_the_end or train_state.done % every == 0:
        train_state.history[-1] |= train_context.evaluation.metrics()


def _of_all(sums: Mapping[str, float], train_context: _TrainContext) -> dict[str, float]:
    """The sums over all processes."""
    values = torch.tensor(list(sums.values()), dtype=torch.float64, device=train_context.scorer.device)
    return dict(zip(sums, train_context.ranks.sum(values).tolist(), strict=True))


def _drop(directory: Path, ranks: Ranks) -> None:
    """Nobody is to go on from what is broken."""
    if ranks.first:
        shutil.rmtree(directory)
