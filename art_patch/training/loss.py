"""The GRPO loss on recorded tokens. Pure; one typed record in, loss and metrics out.

Clipped surrogate with token mean and clip-higher, as DAPO (https://arxiv.org/abs/2503.14476) changed GRPO
(https://arxiv.org/abs/2402.03300): for each sampled token, with w = exp(logprob - recorded logprob),

    loss = -min(w * A, clip(w, 1 - clip_low, 1 + clip_high) * A)

summed over tokens and divided by the number of tokens in the whole optimizer step. The recorded log-probability is the
behaviour policy's, so data from an older policy is corrected by the same ratio. Left out: KL to a reference (none is
needed at these step sizes, see DAPO), sequence-level ratios, entropy bonus.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossInput:
    """N sampled tokens of any number of rows, flat.

    Attributes:
        logprob_N: under the policy in training, with gradient.
        recorded_N: under the policy that sampled, no gradient.
        advantage_N: of the token's trajectory.
        tokens_in_step: sampled tokens in the whole optimizer step; makes gradient accumulation exact.
        clip_low: see `TrainConfig`.
        clip_high: see `TrainConfig`.
    """

    logprob_N: Tensor
    recorded_N: Tensor
    advantage_N: Tensor
    tokens_in_step: int
    clip_low: float
    clip_high: float


@dataclass(frozen=True, slots=True)
class LossMetrics:
    """Sums over the N tokens, so that micro-batches add up.

    Attributes:
        kl_nats: k3 estimate of KL(behaviour || trained), summed.
        clipped: tokens whose gradient the clip stopped.
        gap_nats: largest |logprob - recorded|.
    """

    kl_nats: float
    clipped: int
    gap_nats: float


def grpo_loss(batch: LossInput) -> tuple[Tensor, LossMetrics]:
    """Return the scalar loss (already divided by `tokens_in_step`) and its metrics."""
    log_ratio_N = batch.logprob_N - batch.recorded_N
    ratio_N = torch.exp(log_ratio_N)
    clipped_N = torch.clamp(ratio_N, 1 - batch.clip_low, 1 + batch.clip_high)
    surrogate_N = torch.minimum(ratio_N * batch.advantage_N, clipped_N * batch.advantage_N)
    loss = -surrogate_N.sum() / batch.tokens_in_step
    with torch.no_grad():
        # k3 of http://joschu.net/blog/kl-approx.html with samples from the behaviour policy: exp(x) - 1 - x
        kl_nats = (torch.expm1(log_ratio_N) - log_ratio_N).sum().item()
        stopped = (clipped_N * batch.advantage_N < ratio_N * batch.advantage_N).sum().item()
        gap_nats = log_ratio_N.abs().max().item() if len(log_ratio_N) else 0.0
    return loss, LossMetrics(kl_nats, int(stopped), gap_nats)
