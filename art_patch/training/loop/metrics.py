"""What an update did, step by step and in all. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from art_patch.training.loop.job import TrainJob
from art_patch.training.loop.plan import Step, lessons_of
from art_patch.training.losses.policy_loss import LossMetrics
from art_patch.types import JSON


@dataclass(frozen=True, slots=True)
class UpdateMetrics:
    """What an update did.

    Attributes:
        trajectories: trained on (advantage not zero).
        trained_rows: token sequences they became; more rows than trajectories means that histories forked.
        tokens: sampled tokens trained, once an epoch.
        demonstrations: rows imitated.
        rehearsed: rows of which steps on groups imitate some.
        pairs: rows told apart, two by two.
        steps: optimizer steps made.
        stopped: why it ended early; `None` if it did not.
        loss: mean over the steps of the last phase.
        kl_nats: k2 estimate of KL(behaviour || trained) a token, in the last epoch on groups.
        reference_kl_nats: KL(trained || reference) a token, likewise; 0 without a reference.
        clip_fraction: share of tokens whose gradient the clip stopped, over all epochs on groups.
        effective_share: effective sample size by importance weights over the number of tokens, in the last epoch.
        not_finite: tokens that were dropped because a log-probability was not finite, over all epochs.
        rehearse_nll_nats: negative log-likelihood a token of what was rehearsed, in the last epoch; 0 without.
        entropy_nats: mean over trained tokens, in the last epoch.
        grad_norm: mean before clipping, over the steps of the last phase.
        logprob_gap_nats: largest difference between recorded and own log-probability before the first step, over
            tokens that the policy at the start sampled; tells whether trainer and server compute the same thing.
            `None` if it sampled none of them.
        computed_tokens: that went through the model in the steps.
        distinct_tokens: that had to; the same where what rows share is computed once.
        shared_ratio: how many times as many would have, row by row.
        why_not_shared: why what rows share was computed for each of them; `None` if it was not.
        tokens_per_s: computed tokens a second, over all steps.
        eval_loss: of the policy that was published, on groups that it did not learn from, see `training.evaluation`;
            `None` if it was not evaluated.
        eval_kl_nats: likewise.
        eval_gain_nats: likewise.
        history: metrics of each step.
    """

    trajectories: int
    trained_rows: int
    tokens: int
    demonstrations: int
    rehearsed: int
    pairs: int
    steps: int
    stopped: str | None
    loss: float
    kl_nats: float
    reference_kl_nats: float
    clip_fraction: float
    effective_share: float
    not_finite: int
    rehearse_nll_nats: float
    entropy_nats: float
    grad_norm: float
    logprob_gap_nats: float | None
    computed_tokens: int
    distinct_tokens: int
    shared_ratio: float
    why_not_shared: str | None
    tokens_per_s: float
    eval_loss: float | None
    eval_kl_nats: float | None
    eval_gain_nats: float | None
    history: tuple[JSON, ...] = field(repr=False)


def step_metrics(step: Step, sums: Mapping[str, float], rehearsed: Mapping[str, float]) -> dict[str, Any]:
    """Return what the history keeps of a step.

    Args:
        step: which.
        sums: over its packs, of all processes.
        rehearsed: likewise, of what it rehearsed.
    """
    tokens = int(sums["tokens"])
    metrics: dict[str, Any] = {"phase": step.phase, "epoch": step.epoch, "tokens": tokens, "loss": sums["loss"]}
    work = ("computed_tokens", "distinct_tokens", "row_tokens")
    metrics |= {name: int(sums[name] + rehearsed[name]) for name in work}
    each = tokens or math.nan
    metrics |= {"entropy_nats": sums["entropy_nats"] / each}
    if step.phase == "groups":
        clipped = sums["clipped_low"] + sums["clipped_high"]
        metrics |= {
            "kl_nats": sums["kl_nats"] / each,
            "reference_kl_nats": sums["reference_kl_nats"] / each,
            "clip_fraction": clipped / each,
            "effective_share": LossMetrics(
                tokens=tokens, weight=sums["weight"], weight_squared=sums["weight_squared"]
            ).effective_share,
            "not_finite": int(sums["not_finite"]),
        }
    if step.rehearsed:
        metrics |= {
            "rehearsed_tokens": int(rehearsed["tokens"]),
            "rehearse_nll_nats": rehearsed["nll_nats"] / rehearsed["tokens"],
        }
    if step.phase == "prefer":
        pairs = len(step.items)
        metrics |= {"right_share": sums["right"] / pairs}
        metrics |= {name: sums[name] / pairs for name in ("margin", "chosen_reward", "rejected_reward")}
    return metrics


def update_metrics(
    job: TrainJob,
    history: Sequence[JSON],
    *,
    stopped: str | None,
    gap_nats: float | None,
    why_not_shared: str | None,
) -> UpdateMetrics:
    """Return an update's metrics in all.

    Args:
        job: what was learned from.
        history: of every step made, at least one.
        stopped: why it ended early.
        gap_nats: of the start.
        why_not_shared: of the model.
    """
    learned = [each for lesson in lessons_of(job) for each in lesson.examples if each.advantage != 0.0]
    of_groups = [metrics for metrics in history if metrics["phase"] == "groups"]
    last_epoch = [metrics for metrics in of_groups if metrics["epoch"] == of_groups[-1]["epoch"]]
    last_phase = [metrics for metrics in history if metrics["phase"] == history[-1]["phase"]]
    seen = [metrics for metrics in last_phase if metrics["epoch"] == last_phase[-1]["epoch"]]
    computed = sum(metrics["computed_tokens"] for metrics in history)
    seconds = sum(metrics["seconds"] for metrics in history)
    return UpdateMetrics(
        trajectories=len(learned),
        trained_rows=sum(len(each.rows) for each in learned),
        tokens=sum(each.sampled for each in learned),
        demonstrations=len(job.demonstrations),
        rehearsed=len(job.rehearsed),
        pairs=len(job.pairs),
        steps=len(history),
        stopped=stopped,
        loss=_mean(last_phase, "loss"),
        kl_nats=_a_token(last_epoch, "kl_nats"),
        reference_kl_nats=_a_token(last_epoch, "reference_kl_nats"),
        clip_fraction=_a_token(of_groups, "clip_fraction"),
        effective_share=_a_token(last_epoch, "effective_share"),
        not_finite=sum(metrics["not_finite"] for metrics in of_groups),
        rehearse_nll_nats=_a_token(last_epoch, "rehearse_nll_nats", "rehearsed_tokens") if job.rehearsed else 0.0,
        entropy_nats=_a_token(seen, "entropy_nats"),
        grad_norm=_mean(last_phase, "grad_norm"),
        logprob_gap_nats=gap_nats,
        computed_tokens=computed,
        distinct_tokens=sum(metrics["distinct_tokens"] for metrics in history),
        shared_ratio=sum(metrics["row_tokens"] for metrics in history) / computed,
        why_not_shared=why_not_shared,
        tokens_per_s=computed / seconds,
        eval_loss=history[-1].get("eval_loss"),
        eval_kl_nats=history[-1].get("eval_kl_nats"),
        eval_gain_nats=history[-1].get("eval_gain_nats"),
        history=tuple(history),
    )


def _mean(history: Sequence[JSON], name: str) -> float:
    return sum(metrics[name] for metrics in history) / len(history)


def _a_token(history: Sequence[JSON], name: str, counted: str = "tokens") -> float:
    tokens = sum(metrics[counted] for metrics in history)
    return sum(metrics[name] * metrics[counted] for metrics in history) / tokens if tokens else 0.0
