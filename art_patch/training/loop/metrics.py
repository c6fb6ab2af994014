"""Metrics of each step and of a whole update, the checks that end an update early, and a progress line for people.

`without_far_rows` leaves out the rows (token sequences) that a policy far from the one at the start sampled. What their
siblings are compared with changes then, so the advantages of these move by a constant.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from art_patch.training.config import TrainConfig
from art_patch.training.data.rows import Example
from art_patch.training.loop.gradients import START_FILE, StartScores, examples_of
from art_patch.training.loop.job import Sibling, Step, TrainGroup, TrainJob, read_file
from art_patch.training.losses import LossMetrics
from art_patch.types import JSON

_DISTANCES = ("kl_nats", "update_kl_nats", "reference_kl_nats", "effective_share")
_WORK = ("computed_tokens", "distinct_tokens", "row_tokens")


@dataclass(slots=True)
class TrainState:
    """Progress of an update, as a checkpoint stores it; the checkpoint uses the same field names."""

    done: int = 0  # number of optimizer steps of the plan that were made
    stopped: str | None = None  # why the update ends before the end of its plan; `None` if it does not
    gap_nats: float | None = None  # see `StartScores`
    mean_gap_nats: float | None = None
    far_rows: int = 0  # see `UpdateMetrics`
    why_not_shared: str | None = None  # why the model computes token sequences one by one, see `Scorer.why_apart`
    best_step: int | None = None  # number of steps at the lowest `eval_loss`; `None` without `early_stop`
    history: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])  # metrics of each step that was made


@dataclass(frozen=True, slots=True)
class UpdateMetrics:
    """Metrics of a whole update. A row is a token sequence; the phases are imitation, preferences and groups."""

    trajectories: int  # number of trajectories in groups that were trained on (their advantage is not zero)
    trained_rows: int  # number of rows of these trajectories; exceeds `trajectories` where conversations forked
    tokens: int  # number of sampled tokens in these rows; each epoch trains all of them
    demonstrations: int  # number of rows in the job for the imitation phase
    rehearsed: int  # number of known rows from which steps on groups drew some to imitate against forgetting
    pairs: int  # number of pairs of a better and a worse row in the job
    steps: int  # number of optimizer steps made
    stopped: str | None  # why the update ended before the end of its plan; `None` if it completed the plan
    loss: float  # mean loss over the steps of the last phase
    # k2 estimate of KL(policy that sampled || policy in training) per token, in the last epoch on groups.
    kl_nats: float
    # k2 estimate of KL(policy at the start of the phase || policy in training) per token, in the last epoch on groups.
    update_kl_nats: float
    reference_kl_nats: float  # KL(trained || reference) per token, in the last epoch on groups; 0 without a reference
    clip_fraction: float  # share of tokens that the clip or cap of the loss affected, over all epochs on groups
    effective_share: float  # effective sample size of the importance weights / tokens, in the last epoch on groups
    not_finite: int  # number of tokens dropped because a log-probability was not finite, over all epochs on groups
    rehearse_nll_nats: float  # mean over the rehearsed tokens, in the last epoch on groups; 0 if none was rehearsed
    entropy_nats: float  # mean entropy over the trained tokens, in the last epoch of the last phase
    grad_norm: float  # mean norm of the gradient before clipping, over the steps of the last phase
    # Largest difference between recorded and computed log-probability before the first step, over tokens that the
    # policy at the start sampled. A large value means that trainer and server do not compute the same. `None` if that
    # policy sampled no token of the data.
    logprob_gap_nats: float | None
    logprob_gap_mean_nats: float | None  # the mean of these differences
    far_rows: int  # number of rows that were not trained because a policy above `max_drift_nats` sampled them
    computed_tokens: int  # number of tokens that went through the model in all steps
    # Number of tokens that would go through the model if each common beginning of rows in a pack were computed once;
    # equals `computed_tokens` if it was.
    distinct_tokens: int
    shared_ratio: float  # tokens in the rows divided by `computed_tokens`; 3 means that sharing saved two thirds
    why_not_shared: str | None  # why common beginnings were computed again for each row; `None` if computed once
    tokens_per_s: float  # computed tokens per second, over all steps
    # Of the published policy on the evaluation groups, see `gradients.evaluate`; `None` if it was not evaluated.
    eval_loss: float | None
    eval_kl_nats: float | None  # KL(policy that sampled || published policy) per token
    eval_gain_nats: float | None  # how much likelier the published policy made the better runs
    history: tuple[JSON, ...] = field(repr=False)  # metrics of each optimizer step, as `step_metrics` returns them


def step_metrics(step: Step, sums: Mapping[str, float], rehearsed: Mapping[str, float]) -> dict[str, Any]:
    """Returns the metrics of one optimizer step of the plan.

    `sums` are over the tokens that the step learned from, and `rehearsed` over the known answers that it imitated
    against forgetting, both of all processes.
    """
    tokens = int(sums["tokens"])
    metrics: dict[str, Any] = {"phase": step.phase, "epoch": step.epoch, "tokens": tokens, "loss": sums["loss"]}
    metrics |= {name: int(sums[name] + rehearsed[name]) for name in _WORK}
    each = tokens or math.nan  # a step that saw no token is refused by `why_broken`, not by a division
    metrics["entropy_nats"] = sums["entropy_nats"] / each
    if step.phase == "groups":
        weights = LossMetrics(tokens=tokens, weight=sums["weight"], weight_squared=sums["weight_squared"])
        metrics |= {
            "kl_nats": sums["kl_nats"] / each,
            "update_kl_nats": sums["update_kl_nats"] / each,
            "reference_kl_nats": sums["reference_kl_nats"] / each,
            "clip_fraction": (sums["clipped_low"] + sums["clipped_high"]) / each,
            "effective_share": weights.effective_share,
            "not_finite": int(sums["not_finite"]),
        }
    if step.rehearsed:
        metrics["rehearsed_tokens"] = int(rehearsed["tokens"])
        metrics["rehearse_nll_nats"] = rehearsed["nll_nats"] / rehearsed["tokens"]
    if step.phase == "prefer":
        names = {"right_share": "right"} | {name: name for name in ("margin", "chosen_reward", "rejected_reward")}
        metrics |= {name: sums[summed] / len(step.items) for name, summed in names.items()}
    return metrics


def why_broken(metrics: Mapping[str, float]) -> str | None:
    """Returns why the update must be dropped after computing this step; `None` if the step's numbers are valid."""
    # The whole update is dropped, because the cause of a number that is not finite is in the weights already.
    wrong = [name for name in ("loss", "grad_norm", "weight_norm") if not math.isfinite(metrics.get(name, 0.0))]
    if wrong:
        return " and ".join(f"{name} {metrics[name]}" for name in wrong)
    return None if metrics["tokens"] else "no finite log-probability"


TOO_FAR = (
    "every row was sampled by a policy above max_drift_nats from the one that the update starts from; use newer runs, "
    "start from the champion, or raise that bound"
)


def why_unfit(train_state: TrainState, config: TrainConfig) -> str | None:
    """Returns why no step may be made with what the server recorded; `None` if the trainer computes the same."""
    gap, most = train_state.mean_gap_nats, config.max_gap_nats
    if most is None or gap is None or gap <= most:
        return None
    if config.base_bits == 4:
        return (
            f"of the tokens that the policy itself sampled, the server's log-probabilities and those of the trainer, "
            f"whose base has 4 bits, differ by {gap:.3g} nats on average, above max_gap_nats={most:g}; take "
            "base_bits=8, or raise max_gap_nats if the gate shall decide on what such an update learns"
        )
    return (
        f"of the tokens that the policy itself sampled, the server's log-probabilities and the trainer's differ by "
        f"{gap:.3g} nats on average, above max_gap_nats={most:g}, so they do not compute the same model: the server "
        "may have served another adapter or base under this name, in another dtype (set dtype to the server's), or "
        "with a chat template or sampling option that changes what it records"
    )


def why_stop(metrics: Mapping[str, float], config: TrainConfig) -> str | None:
    """Returns why the update must end before it makes the step with these metrics; `None` if the step may be made."""
    # A policy that has moved far is no fault. But more steps on the same data would mislead it.
    limits = {"kl_nats": ("update_kl_nats", config.max_kl_nats)}
    limits["clip_fraction"] = ("clip_fraction", config.max_clip_fraction)
    for limit, (name, most) in limits.items():
        if most is not None and name in metrics and metrics[name] > most:
            return f"{name} {metrics[name]:.3g} is above max_{limit}={most:g}"
    return None


def note_evaluation(train_state: TrainState, config: TrainConfig, begin: int) -> bool:
    """Ends the update if `early_stop` says so after this evaluation; returns whether it is the best one so far.

    `begin` is the number of steps before the phase, whose evaluations alone are compared.
    """
    losses = {
        n: step["eval_loss"] for n, step in enumerate(train_state.history, 1) if n > begin and "eval_loss" in step
    }
    if config.early_stop is None or train_state.done not in losses:
        return False
    train_state.best_step = min(losses, key=lambda n: losses[n])
    worse = sum(n > train_state.best_step for n in losses)
    if worse >= config.early_stop and train_state.stopped is None:
        best = f"that of step {train_state.best_step}, {losses[train_state.best_step]:.4g}, which is published"
        train_state.stopped = f"{worse} evaluations in a row had no eval_loss below {best} (early_stop)"
    return train_state.best_step == train_state.done


def update_metrics(job: TrainJob, train_state: TrainState) -> UpdateMetrics:
    """Returns the metrics of a whole update, which has made at least one step, from the metrics of its steps."""
    history = train_state.history
    # A lesson also holds siblings of advantage 0 where there is a KL term; these are not learned from.
    learned = [each for lesson in job.lessons for each in lesson.examples if each.teaches]
    of_groups = [metrics for metrics in history if metrics["phase"] == "groups"]
    last_epoch = [metrics for metrics in of_groups if metrics["epoch"] == of_groups[-1]["epoch"]]
    last_phase = [metrics for metrics in history if metrics["phase"] == history[-1]["phase"]]
    # An update that ended early has less than an epoch here, or no step on groups at all.
    seen = [metrics for metrics in last_phase if metrics["epoch"] == last_phase[-1]["epoch"]]
    work = {name: sum(metrics[name] for metrics in history) for name in (*_WORK, "seconds")}
    computed = work["computed_tokens"]
    published = history[(train_state.best_step or len(history)) - 1]
    return UpdateMetrics(
        trajectories=len(learned),
        trained_rows=sum(len(each.rows) for each in learned),
        tokens=sum(each.sampled for each in learned),
        demonstrations=len(job.demonstrations),
        rehearsed=len(job.rehearsed),
        pairs=len(job.pairs),
        steps=len(history),
        stopped=train_state.stopped,
        **{name: _mean(last_phase, name) for name in ("loss", "grad_norm")},
        **{name: _a_token(last_epoch, name) for name in _DISTANCES},
        clip_fraction=_a_token(of_groups, "clip_fraction"),
        not_finite=sum(metrics["not_finite"] for metrics in of_groups),
        rehearse_nll_nats=_a_token(last_epoch, "rehearse_nll_nats", "rehearsed_tokens") if job.rehearsed else 0.0,
        entropy_nats=_a_token(seen, "entropy_nats"),
        logprob_gap_nats=train_state.gap_nats,
        logprob_gap_mean_nats=train_state.mean_gap_nats,
        far_rows=train_state.far_rows,
        computed_tokens=computed,
        distinct_tokens=work["distinct_tokens"],
        shared_ratio=work["row_tokens"] / computed,
        why_not_shared=train_state.why_not_shared,
        tokens_per_s=computed / work["seconds"],
        eval_loss=published.get("eval_loss"),
        eval_kl_nats=published.get("eval_kl_nats"),
        eval_gain_nats=published.get("eval_gain_nats"),
        history=tuple(history),
    )


def _mean(history: Sequence[JSON], name: str) -> float:
    return sum(metrics[name] for metrics in history) / len(history)


def _a_token(history: Sequence[JSON], name: str, counted: str = "tokens") -> float:
    # Weighed by tokens: steps take whole groups, so they differ in size.
    tokens = sum(metrics[counted] for metrics in history)
    return sum(metrics[name] * metrics[counted] for metrics in history) / tokens if tokens else 0.0


class Notes:
    """Writes one progress line for people after each step: reward, loss, KL, speed, and the remaining time."""

    def __init__(self, job: TrainJob, left: int) -> None:
        """Starts the clock for the remaining time; `left` is the number of steps that the update has yet to make."""
        self._reward = None if job.mean_reward is None else f"reward {job.mean_reward:+.2f}"
        self._left = left
        self._taken = 0
        self._began = time.monotonic()

    def __call__(self, train_state: TrainState) -> str:
        """Returns the line about the step that was just made, or the reason why the update ended early."""
        if train_state.stopped is not None:
            return f"ended early: {train_state.stopped}"
        self._taken += 1
        metrics = train_state.history[-1]
        left_s = (time.monotonic() - self._began) / self._taken * (self._left - self._taken)
        parts = [self._reward, f"loss {metrics['loss']:+.4f}"]
        if "kl_nats" in metrics:
            parts.append(f"KL {metrics['kl_nats']:.4f}")
        if "eval_loss" in metrics:
            loss, kl, gain = (metrics[f"eval_{name}"] for name in ("loss", "kl_nats", "gain_nats"))
            parts.append(f"on other groups: loss {loss:+.4f}, KL {kl:.4f}, gain {gain:+.4f}")
        parts += [f"{metrics['tokens_per_s']:,.0f} tokens/s", f"{left_s:.0f} s left"]
        return ", ".join(part for part in parts if part)


# --- rows that are too far ---


def near_job(job: TrainJob, directory: Path) -> TrainJob:
    """Returns what an update, whose `directory` this is, trained on: the job without the rows that were too far."""
    found = read_file(directory / START_FILE)
    if found is None:
        return job
    sizes = [example.sampled for example in examples_of(job.lessons)]
    old = torch.from_numpy(found[0]["old"]).split(sizes)
    return without_far_rows(job, StartScores(old, (), None, None))[0]


def without_far_rows(job: TrainJob, start: StartScores) -> tuple[TrainJob, StartScores, int]:
    """Returns the job and its scores without rows above `max_drift_nats`, and the number of these rows.

    The drift of a row is the k2 estimate of KL(policy that sampled || policy at the start) per token.
    """
    most = job.config.max_drift_nats
    if most is None:
        return job, start, 0
    kept: dict[tuple[str, str], list[bool]] = {}
    for (group, sibling), old_N in zip(_scored(job), start.old, strict=True):
        drifts = map(_drift_nats, sibling.example.rows, _by_row(sibling.example, old_N))
        kept[group.id, sibling.trajectory_id] = [drift <= most for drift in drifts]
    far = sum(near.count(False) for near in kept.values())
    if not far:
        return job, start, 0
    near = replace(job, groups=tuple(_near_group(group, kept) for group in job.groups))
    known = {(group.id, sibling.trajectory_id): sibling.example for group, sibling in _scored(job)}

    def rest(scores: Sequence[Tensor]) -> tuple[Tensor, ...]:
        of = dict(zip(known, scores, strict=True))
        keys = [(group.id, sibling.trajectory_id) for group, sibling in _scored(near)]
        return tuple(torch.cat(list(compress(_by_row(known[key], of[key]), kept[key]))) for key in keys)

    reference = None if start.reference is None else rest(start.reference)
    return near, replace(start, old=rest(start.old), reference=reference), far


def _scored(job: TrainJob) -> Iterator[tuple[TrainGroup, Sibling]]:
    # In the order of `lessons`, and so of the scores.
    for group in job.groups:
        if group.teaches:
            yield from ((group, sibling) for sibling in job.computed(group))


def _by_row(example: Example, scores_N: Tensor) -> Sequence[Tensor]:
    return scores_N.split([row.sampled for row in example.rows])


def _drift_nats(row: Any, old_N: Tensor) -> float:
    recorded_N = torch.tensor(list(compress(row.logprobs_T, row.sampled_T)), dtype=old_N.dtype, device=old_N.device)
    squares_N = (old_N - recorded_N).square() / 2
    # A token that is not finite is dropped by the loss, and says nothing of the others.
    return float(squares_N[squares_N.isfinite()].mean().nan_to_num())


def _near_group(group: TrainGroup, kept: Mapping[tuple[str, str], Sequence[bool]]) -> TrainGroup:
    def near(sibling: Sibling) -> Sibling:
        keep = kept.get((group.id, sibling.trajectory_id))
        rows = sibling.example.rows if keep is None else tuple(compress(sibling.example.rows, keep))
        return replace(sibling, example=replace(sibling.example, rows=rows))

    siblings = [near(sibling) for sibling in group.siblings]
    taught = any(row.teacher_T for sibling in group.siblings for row in sibling.example.rows)  # compared with nobody
    pairs = zip(siblings, group.siblings, strict=True)
    if taught or all(bool(new.example.rows) == bool(old.example.rows) for new, old in pairs):
        return replace(group, siblings=tuple(siblings))
    # Advantage 0 is that of a sibling without a reward, which is compared with nobody.
    compared = [each.example.advantage for each in siblings if each.example.rows and each.example.advantage != 0.0]
    mean = fmean(compared) if compared else 0.0

    def moved(sibling: Sibling) -> Sibling:
        advantage = sibling.example.advantage
        there = sibling.example.rows and advantage != 0.0 and len(compared) > 1
        return replace(sibling, example=replace(sibling.example, advantage=advantage - mean if there else 0.0))

    return replace(group, siblings=tuple(map(moved, siblings)))
