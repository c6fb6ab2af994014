"""The losses once more, token by token in plain Python: slow, without autograd, and nothing shared with the package.

`plain_loss` takes the point at which weights that are constants of the gradient are computed apart from the point at
which the rest is, so that finite differences of it are the gradient that autograd must find.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from art_patch.training import LossConfig
from art_patch.training.losses import LossInput


@dataclass(frozen=True)
class Token:
    """One sampled token; log-probabilities in nats."""

    logprob: float
    old: float
    recorded: float
    advantage: float
    trajectory: int
    reference: float = -1.0


def loss_input(
    tokens: Sequence[Token],
    *,
    tokens_in_step: int | None = None,
    trajectories_in_step: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> LossInput:
    """The same as tensors; alone in its optimizer step unless told otherwise."""

    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(token, name) for token in tokens], dtype=dtype)

    return LossInput(
        logprob_N=column("logprob").requires_grad_(),
        old_N=column("old"),
        recorded_N=column("recorded"),
        advantage_N=column("advantage"),
        trajectory_N=torch.tensor([token.trajectory for token in tokens], dtype=torch.int64),
        tokens_in_step=tokens_in_step or len(tokens),
        trajectories_in_step=trajectories_in_step or 1 + max(token.trajectory for token in tokens),
        reference_N=column("reference"),
    )


def plain_loss(tokens: Sequence[Token], config: LossConfig, at: Sequence[float] | None = None) -> float:
    """Loss of a step of these tokens at the log-probabilities `at`, with constant weights taken at their own."""
    at = [token.logprob for token in tokens] if at is None else at
    trajectories = len({token.trajectory for token in tokens})
    total = 0.0
    for token, here in zip(tokens, at, strict=True):
        siblings = [(t, x) for t, x in zip(tokens, at, strict=True) if t.trajectory == token.trajectory]
        if config.ratio_level == "token":
            ratio, frozen = math.exp(here - token.old), math.exp(token.logprob - token.old)
        else:
            ratio = math.exp(sum(x - t.old for t, x in siblings) / len(siblings))
            frozen = math.exp(sum(t.logprob - t.old for t, _ in siblings) / len(siblings))
        loss = _surrogate(token, here, ratio, frozen, [t for t, _ in siblings], config)
        drift = sum(t.recorded - t.logprob for t, _ in siblings) / len(siblings)
        if config.off_policy_nats is not None and token.advantage < 0 and drift > config.off_policy_nats:
            loss = 0.0
        x = here - token.reference
        kl = {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}[config.kl_estimator]
        loss += config.kl_coefficient * ratio * kl
        if config.name in ("dapo", "cispo", "vespo"):
            total += loss / len(tokens)
        elif config.name in ("grpo", "gspo", "sapo"):
            total += loss / len(siblings) / trajectories
        else:
            total += loss / trajectories / config.settings.get("max_completion_tokens", 1)
    return total


def _importance(token: Token, config: LossConfig) -> float:
    return 1.0 if config.importance_cap is None else min(config.importance_cap, math.exp(token.old - token.recorded))


def _surrogate(
    token: Token, logprob: float, ratio: float, frozen: float, siblings: Sequence[Token], config: LossConfig
) -> float:
    a, s = token.advantage, config.settings
    if config.name == "vespo":
        w = math.prod(math.exp(t.logprob - t.old) * _importance(t, config) for t in siblings)
        k, lam = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        return -(w**k) * math.exp(lam * (1 - w)) * a * logprob
    if config.name == "cispo":
        loss = -min(frozen, s["ratio_cap"]) * a * logprob
    elif config.name == "sapo":
        t = 1.0 if a > 0 else 1.05
        loss = -a * 4 / t / (1 + math.exp(-t * (ratio - 1)))
    else:
        clipped = min(max(ratio, 1 - s["clip_low"]), 1 + s["clip_high"])
        loss = -min(min(ratio, s["clip_max"]) * a, clipped * a)
    return loss * _importance(token, config)
