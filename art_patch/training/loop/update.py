"""The training loop: makes one update, from a base model, a LoRA and the rows of a job to a new, published LoRA.

The function `update` shows the whole loop in order. It loads the model and scores all data once under the policy at the
start. For each step of the plan it computes forward pass, loss and gradient, clips the gradient, and lets the optimizer
make the step. At set intervals it evaluates and writes a checkpoint. At the end it publishes the LoRA by an atomic
rename.

A checkpoint holds the LoRA's weights, the optimizer's moments and step counts, the state of torch's random number
generator, the number of steps done, and the metrics of each step. A new one replaces the old one atomically. So if the
process is killed at any moment, a new call with the same job and directory continues from the newest checkpoint and
makes, bit for bit, the same policy. If a loss, a gradient or a weight is not finite, the update is dropped: its
directory is deleted and nothing is published.
"""

import math
import shutil
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from art_patch._lib.version import __version__
from art_patch.errors import AdapterRejected, TrainingError
from art_patch.policies import ENTRY, MANIFEST, Probe, publish_adapter, read_json, unpublished
from art_patch.training.config import TrainConfig
from art_patch.training.data.rows import Example, Row
from art_patch.training.loop import metrics as measures
from art_patch.training.loop.gradients import evaluate, gradients_of, phase_scores, start_scores
from art_patch.training.loop.job import Arrays, TrainJob, claim, plan_of, read_file, write_arrays
from art_patch.training.loop.loading import (
    backend_of,
    default_device,
    dropout_on,
    give_memory_back,
    load,
    made_with,
    require_machine,
)
from art_patch.training.loop.metrics import Notes, TrainState, UpdateMetrics, near_job, without_far_rows
from art_patch.training.loop.processes import ALONE, Progress, Ranks, launch, silently
from art_patch.training.loop.unsloth import unsloth_python
from art_patch.training.packed import exact
from art_patch.training.scoring import Scorer

_JOB = "job"  # entry of the manifest: the fingerprint of the job that made the policy
_PROBE_TOKENS = 48


def run_job(job: TrainJob, directory: Path, *, progress: Progress = silently) -> UpdateMetrics:
    """Makes the policy of a job and returns the metrics; continues an update that was interrupted.

    The update runs in this process, or in new ones if the config asks for several processes or for Unsloth, which has
    an interpreter of its own. Raises the errors of `update`, and `TrainingError` if a process died; nothing is
    published in these cases.
    """
    require_machine(job.config)
    # Unsloth changes transformers, which this process may have imported long ago.
    python = unsloth_python() if backend_of(job.config) == "unsloth" else None
    if (job.config.processes > 1 or python is not None) and not is_published(job):
        claim(directory, job)
        launch(directory, job.config.processes, progress, python=python)
    return update(job, directory, progress=progress)  # of a published policy it only returns the metrics


def update(job: TrainJob, directory: Path, *, progress: Progress = silently, ranks: Ranks = ALONE) -> UpdateMetrics:
    """Trains and publishes one policy; after an interrupted call, continues from the newest checkpoint.

    The job's own `directory` holds the job's file, scores and checkpoints. It may be deleted once the ledger has
    registered the policy. `progress` is called before loading and after each optimizer step.

    Raises:
        TrainingError: There is nothing to learn, or nothing near enough (`max_drift_nats`); trainer and server do not
            compute the same (`max_gap_nats`); a loss, gradient or weight is not finite; the first step already exceeds
            `max_kl_nats` or `max_clip_fraction`; or the directory belongs to another job or is not writable.
        AdapterRejected: Another job published `job.target`, or this job did and its directory is missing.
        ConfigError: The backend of the config is missing on this machine.
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
    if published:  # killed between publishing and the registration of the policy
        return measures.update_metrics(near_job(job, directory), train_state)

    progress(train_state.done, len(plan), "loading the base model")
    config = job.config
    device = default_device(ranks.rank)
    give_memory_back(device)
    model = load(job, device)
    scorer = Scorer(model)
    evaluated = [example for lesson in job.evaluated for example in lesson.examples]
    scorer.prove([*(Example((row,)) for row in job.rows), *evaluated])
    # Before the checkpoint's weights are restored: these are scores of the policy at the start.
    start = start_scores(job, model, scorer, directory, ranks)
    train_state.gap_nats, train_state.mean_gap_nats = start.gap_nats, start.mean_gap_nats
    train_state.why_not_shared = scorer.why_apart
    near, start, train_state.far_rows = without_far_rows(job, start)
    plan = plan_of(near)
    if (unfit := measures.why_unfit(train_state, config) or (None if plan else measures.TOO_FAR)) is not None:
        if ranks.first:
            shutil.rmtree(directory)
        raise TrainingError(f"{unfit}; nothing was trained or published")
    learner = Learner(model, config)
    learner.restore(kept)
    gradients = gradients_of(near, scorer, start, ranks)
    checkpoint_writer = CheckpointWriter(directory, config.checkpoint_every_s, config.save_steps)
    phase = plan[0].phase
    note = Notes(job, len(plan) - train_state.done)

    while train_state.done < len(plan) and train_state.stopped is None:
        step = plan[train_state.done]
        began = time.monotonic()
        if step.phase != phase:
            phase, start = step.phase, phase_scores(step.phase, near, start, scorer, directory, ranks)
            gradients = gradients_of(near, scorer, start, ranks)

        # Forward, loss and backward, pack by pack. The sums are those of all processes.
        with dropout_on(model, config, train_state.done, ranks.rank):
            sums = ranks.sum_each(gradients[step.phase](step.items), scorer.device)
            rehearsed = ranks.sum_each(gradients["rehearse"](step.rehearsed), scorer.device)
        metrics = measures.step_metrics(step, sums, rehearsed)

        # Clip, and step unless the gradient is broken or the policy has moved far enough.
        metrics["grad_norm"] = learner.clip(ranks)
        broken = measures.why_broken(metrics)
        if broken is None:
            train_state.stopped = measures.why_stop(metrics, config)
            if train_state.stopped is None:
                metrics["weight_norm"] = learner.step(step.number, step.of)
                broken = measures.why_broken(metrics)
        if broken or (train_state.stopped and not train_state.done):
            if ranks.first:
                shutil.rmtree(directory)  # an update must not go on from a checkpoint of broken weights
            cure = (
                "lower --learning-rate, or look for absurd rewards" if broken else "raise that bound, or use newer runs"
            )
            raise TrainingError(
                f"{broken or train_state.stopped} at step {train_state.done + 1} ({step.phase}): the update was "
                f"dropped and nothing published; {cure}"
            )
        if train_state.stopped is None:
            metrics["seconds"] = time.monotonic() - began
            metrics["tokens_per_s"] = metrics["computed_tokens"] / metrics["seconds"]
            train_state.history.append(metrics)
            train_state.done += 1

        # Evaluate every `eval_steps` steps and at the end; once if both fall together, or the end comes early.
        at_the_end = train_state.done == len(plan) or train_state.stopped is not None
        due = config.eval_steps is not None and (at_the_end or train_state.done % config.eval_steps == 0)
        if due and "eval_loss" not in train_state.history[-1]:
            train_state.history[-1] |= evaluate(near, scorer, start, ranks)
            if measures.note_evaluation(train_state, config, len(plan) - plan[-1].of):
                learner.keep_best()

        # Keep a checkpoint now and then, and always at the end of a phase.
        if ranks.first:
            checkpoint_writer.keep(train_state, learner, now=step.last or train_state.stopped is not None)
        progress(train_state.done, len(plan), note(train_state))

    learner.take_best()
    if ranks.first:
        publish(job, model, scorer)
    return measures.update_metrics(near, train_state)


def is_published(job: TrainJob) -> bool:
    """Tells whether this job has published `job.target`; raises `AdapterRejected` if another job published it."""
    if not job.target.exists():
        return False
    if read_json(job.target, MANIFEST).get(_JOB) != job.fingerprint:
        raise AdapterRejected(f"{job.target} exists already and a policy never changes. Publish under the next step.")
    return True


def publish(job: TrainJob, model: Any, scorer: Scorer) -> None:
    """Publishes the LoRA of the trained model, with a probe, at `job.target`.

    Raises `AdapterRejected` if the target exists, and `TrainingError` if a log-probability of the probe is not finite.
    """
    with exact(model):  # the server has the whole base
        probe = probe_of(model, scorer, job.rows)
    with unpublished(job.target) as directory:
        model.save_pretrained(directory, safe_serialization=True)
        # PEFT's model card is a form that nobody has filled in. What there is to say is in the manifest.
        (directory / "README.md").unlink(missing_ok=True)
        extra = {"base": job.base, "config": asdict(job.config), _JOB: job.fingerprint, ENTRY: probe.entry()}
        extra |= {**job.lineage, "art_patch": __version__, "made_with": made_with(job.config), "made_at": time.time()}
        publish_adapter(directory, job.target, base_sha256=job.base_sha256, extra=extra)


def probe_of(model: Any, scorer: Scorer, rows: Iterable[Row]) -> Probe:
    """Returns the probe of a trained policy: a few log-probabilities with which servers compare their own.

    The context is the end of the shortest of `rows` (token sequences). At each of its positions the likeliest next
    token under the policy is scored, with the LoRA and without.
    """
    row = min(rows, key=lambda row: len(row.ids_T))  # the shortest, because every server computes it when it loads
    last = max(place for place, sampled in enumerate(row.sampled_T) if sampled) + 1
    ids_T = row.ids_T[max(0, last - _PROBE_TOKENS) : last]  # T tokens; V vocabulary
    tuned_TV = scorer.next_TV(ids_T[:-1])
    with model.disable_adapter():
        base_TV = scorer.next_TV(ids_T[:-1])
    targets_T1 = tuned_TV.argmax(dim=-1, keepdim=True)
    tuned, base = (tuple(each.gather(1, targets_T1).squeeze(1).tolist()) for each in (tuned_TV, base_TV))
    if not all(map(math.isfinite, tuned)):
        raise TrainingError("the trained policy's log-probabilities are not finite; lower --learning-rate")
    return Probe(ids_T, tuned, base, str(model.dtype).removeprefix("torch."), tuple(targets_T1.squeeze(1).tolist()))


_BETAS = (0.9, 0.95)
_WEIGHT, _BEST, _RANDOM = "weight", "best", "torch_rng"
_FILE = "checkpoint.safetensors"


def learning_rate_share(config: TrainConfig, number: int, of: int) -> float:
    """Returns which share of the learning rate step `number` (from 0) of a phase of `of` steps uses."""
    if number < config.warmup_steps:
        return (number + 1) / (config.warmup_steps + 1)
    gone = (number - config.warmup_steps) / max(1, of - config.warmup_steps)
    return {"constant": 1.0, "linear": 1 - gone, "cosine": (1 + math.cos(math.pi * gone)) / 2}[config.lr_schedule]


class Learner:
    """The AdamW optimizer of an update, for the trainable weights of a model of `load_policy`: those of the LoRA."""

    def __init__(self, model: Any, config: TrainConfig) -> None:
        self._config = config
        self._best: dict[str, torch.Tensor] = {}
        self._weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self._optimizer = torch.optim.AdamW(
            list(self._weights.values()), lr=config.learning_rate, betas=_BETAS, weight_decay=config.weight_decay
        )

    def clip(self, ranks: Ranks) -> float:
        """Sums the gradients of all processes, scales them to `max_grad_norm` at most, and returns the norm before."""
        ranks.sum_gradients(self._weights.values())
        return float(torch.nn.utils.clip_grad_norm_(self._weights.values(), self._config.max_grad_norm))

    def step(self, number: int, of: int = 1) -> float:
        """Lets AdamW change the weights by their gradients, clears the gradients, and returns the norm of the weights.

        `number` is the step's number within its phase, from 0, and `of` the number of steps of the phase. At 0 the
        optimizer's moments are cleared. The first `warmup_steps` steps of a phase use a smaller learning rate.
        """
        if number == 0:
            self._optimizer.state.clear()  # moments of another phase's loss say nothing about this one
        # Warm-up of each phase: with the moments cleared, Adam's first steps are of full size whatever the gradient.
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.learning_rate * learning_rate_share(self._config, number, of)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(torch.nn.utils.get_total_norm([weight.detach() for weight in self._weights.values()]))

    def keep_best(self) -> None:
        """Keeps a copy of the weights, which replaces an earlier one."""
        self._best = {name: weight.detach().clone() for name, weight in self._weights.items()}

    @torch.no_grad()
    def take_best(self) -> None:
        """Restores the weights that `keep_best` kept, if it ever did."""
        for name, weight in self._best.items():
            self._weights[name].copy_(weight)

    def arrays(self) -> Arrays:
        """Returns the state for a checkpoint: weights, the best ones, AdamW's moments and step counts, random state."""
        tensors = {f"{_WEIGHT} {name}": weight.detach() for name, weight in self._weights.items()}
        tensors |= {f"{_BEST} {name}": weight for name, weight in self._best.items()}
        for name, weight in self._weights.items():
            tensors |= {f"{slot} {name}": value for slot, value in self._optimizer.state[weight].items()}
        # Of the CPU alone; dropout seeds itself at each step, so a GPU's random numbers need not be kept.
        tensors[_RANDOM] = torch.get_rng_state()
        return {name: tensor.cpu().numpy() for name, tensor in tensors.items()}

    def restore(self, arrays: Arrays) -> None:
        """Restores the state that `arrays()` returned; an empty mapping (no checkpoint yet) changes nothing."""
        for key, array in arrays.items():
            slot, _, name = key.partition(" ")
            tensor = torch.from_numpy(array)
            if slot == _RANDOM:
                torch.set_rng_state(tensor)
            elif slot == _BEST:
                self._best[name] = tensor.to(self._weights[name].device)
            elif slot == _WEIGHT:
                with torch.no_grad():
                    self._weights[name].copy_(tensor)
            else:
                weight = self._weights[name]
                # AdamW counts its steps on the CPU, in a tensor without axes; its moments lie beside the weights.
                self._optimizer.state[weight][slot] = tensor.to(weight.device) if tensor.dim() else tensor


def read_train_state(directory: Path) -> tuple[TrainState, Arrays]:
    """Reads the checkpoint in a job directory: the progress of the update, and the arrays for `Learner.restore`.

    Without a checkpoint it returns the state of a new update and no arrays. Raises `TrainingError` if the checkpoint is
    damaged or cannot be read.
    """
    found = read_file(directory / _FILE)
    return (TrainState(), {}) if found is None else (TrainState(**found[1]), found[0])


class CheckpointWriter:
    """Writes an update's checkpoints, due `every_s` seconds after the last and after every `every_steps` steps."""

    def __init__(self, directory: Path, every_s: float, every_steps: int | None = None) -> None:
        self._path, self._every_s, self._every_steps = directory / _FILE, every_s, every_steps
        self._kept_at = time.monotonic()

    def keep(self, train_state: TrainState, learner: Learner, *, now: bool) -> None:
        """Writes a checkpoint if one is due by time or by number of steps, or if `now`; call it after every step.

        Raises `TrainingError` if the disk is full or not writable. The previous checkpoint stays valid.
        """
        counted = self._every_steps is not None and train_state.done % self._every_steps == 0
        if now or counted or time.monotonic() - self._kept_at >= self._every_s:
            write_arrays(self._path, learner.arrays(), asdict(train_state))
            self._kept_at = time.monotonic()
