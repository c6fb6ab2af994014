"""Losses of learning from answers that are given: imitation and preference. Pure tensors.

Both are means over the whole optimizer step, whose size is an argument, so that micro-batches change memory, not the
gradient. Metrics are sums over the micro-batch; divide by the step's size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True, slots=True)
class SftInput:
    """N learned tokens of a micro-batch, flat.

    Attributes:
        logprob_N: log-probability of each under the model, at its temperature, with gradient.
        tokens_in_step: learned tokens of the whole optimizer step.
    """

    logprob_N: Tensor
    tokens_in_step: int


@dataclass(frozen=True, slots=True)
class SftMetrics:
    """Sums over the micro-batch.

    Attributes:
        nll_nats: negative log-likelihood of its tokens; over the step's tokens it is the loss.
    """

    nll_nats: float


def sft_loss(batch: SftInput) -> tuple[Tensor, SftMetrics]:
    """Return the micro-batch's part of the mean negative log-likelihood of the step's learned tokens.

    Each token weighs the same, whatever answer it is in.
    """
    nll = -batch.logprob_N.sum()
    return nll / batch.tokens_in_step, SftMetrics(nll.item())


def sums_R(logprob_N: Tensor, row_N: Tensor, rows: int) -> Tensor:
    """Return the log-probability of what is marked in each of R rows.

    Args:
        logprob_N: of each marked token.
        row_N: which row it is of, from 0, on the same device.
        rows: R.
    """
    return logprob_N.new_zeros(rows).index_add(0, row_N, logprob_N)


@dataclass(frozen=True, slots=True)
class PreferenceInput:
    """P pairs of a micro-batch; log-probabilities are summed over what is marked in the row (`sums_R`).

    Attributes:
        chosen_P: of the better rows under the model, with gradient.
        rejected_P: of the worse rows under the model, with gradient.
        chosen_reference_P: of the better rows under the reference: the policy that the update starts from.
        rejected_reference_P: of the worse rows under the reference.
        beta: how dear it is to move away from the reference.
        pairs_in_step: pairs of the whole optimizer step.
    """

    chosen_P: Tensor
    rejected_P: Tensor
    chosen_reference_P: Tensor
    rejected_reference_P: Tensor
    beta: float
    pairs_in_step: int


@dataclass(frozen=True, slots=True)
class PreferenceMetrics:
    """Sums over the micro-batch; a row's reward is beta times its log-ratio to the reference.

    Attributes:
        right: pairs whose better row has the higher reward.
        margin: by how much it is higher.
        chosen_reward: of the better rows; where it falls, the model unlearns what it should prefer.
        rejected_reward: of the worse rows.
    """

    right: int
    margin: float
    chosen_reward: float
    rejected_reward: float


def preference_loss(batch: PreferenceInput) -> tuple[Tensor, PreferenceMetrics]:
    """Return the micro-batch's part of the mean of `-log sigmoid(reward of the better - reward of the worse)`.

    DPO, https://arxiv.org/abs/2305.18290, equation 7. Left out: label smoothing, length normalisation, an added
    likelihood of the better row.
    """
    chosen_P = batch.beta * (batch.chosen_P - batch.chosen_reference_P)
    rejected_P = batch.beta * (batch.rejected_P - batch.rejected_reference_P)
    margin_P = chosen_P - rejected_P
    loss = -logsigmoid(margin_P).sum() / batch.pairs_in_step
    with torch.no_grad():
        return loss, PreferenceMetrics(
            right=int((margin_P > 0).sum().item()),
            margin=margin_P.sum().item(),
            chosen_reward=chosen_P.sum().item(),
            rejected_reward=rejected_P.sum().item(),
        )
