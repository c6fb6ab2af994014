"""The losses of imitation (SFT) and of preference (DPO). Pure tensors.

Both are means over the whole optimizer step, whose size is an argument. So the size of micro-batches changes memory,
not the gradient. Metrics are sums over the micro-batch; divide them by the step's size. Names of axes: N learned
tokens, R rows, P pairs of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True, slots=True)
class SftInput:
    """N learned tokens of a micro-batch, flat, with their log-probabilities under the model, with gradient."""

    logprob_N: Tensor
    tokens_in_step: int


@dataclass(frozen=True, slots=True)
class SftMetrics:
    """The summed negative log-likelihood of a micro-batch's tokens; divided by the step's tokens it is the loss."""

    nll_nats: float


def sft_loss(batch: SftInput) -> tuple[Tensor, SftMetrics]:
    """Returns the micro-batch's part of the mean negative log-likelihood of the step's learned tokens."""
    # The mean over tokens, not over answers: each token weighs the same, however long its answer is.
    nll = -batch.logprob_N.sum()
    return nll / batch.tokens_in_step, SftMetrics(nll.item())


def sums_R(logprob_N: Tensor, row_N: Tensor, rows: int) -> Tensor:
    """Returns the summed log-probability of the marked tokens in each of `rows` rows.

    `row_N` is the number of each token's row, from 0, on the device of `logprob_N`.
    """
    return logprob_N.new_zeros(rows).index_add(0, row_N, logprob_N)


@dataclass(frozen=True, slots=True)
class PreferenceInput:
    """P pairs of rows of a micro-batch; log-probabilities are summed over the marked tokens of a row (`sums_R`).

    Attributes:
        chosen_P: Log-probability of the better rows under the model, with gradient.
        rejected_P: Log-probability of the worse rows under the model, with gradient.
        chosen_reference_P: Log-probability of the better rows under the policy that the update starts from.
        rejected_reference_P: Log-probability of the worse rows under that policy.
        beta: Scale of rewards. The larger it is, the nearer the model stays to the policy at the start.
        pairs_in_step: Number of pairs in the whole optimizer step.
    """

    chosen_P: Tensor
    rejected_P: Tensor
    chosen_reference_P: Tensor
    rejected_reference_P: Tensor
    beta: float
    pairs_in_step: int


@dataclass(frozen=True, slots=True)
class PreferenceMetrics:
    """Sums over the pairs of a micro-batch; a row's reward is beta times its log-ratio to the reference.

    Attributes:
        right: Number of pairs whose better row has the higher reward.
        margin: Reward of the better row less that of the worse row.
        chosen_reward: Reward of the better row. Where it falls, the model unlearns what it should prefer.
        rejected_reward: Reward of the worse row.
    """

    right: int
    margin: float
    chosen_reward: float
    rejected_reward: float


def preference_loss(batch: PreferenceInput) -> tuple[Tensor, PreferenceMetrics]:
    """Returns the micro-batch's part of the mean of `-log sigmoid(reward of the better - reward of the worse)`.

    DPO, https://arxiv.org/abs/2305.18290, equation 7. Left out: label smoothing, length normalisation, an added
    likelihood of the better row.
    """
    # A row's reward is beta times its log-ratio to the reference, whose log-probabilities carry no gradient.
    chosen_P = batch.beta * (batch.chosen_P - batch.chosen_reference_P)
    rejected_P = batch.beta * (batch.rejected_P - batch.rejected_reference_P)
    margin_P = chosen_P - rejected_P
    loss = -logsigmoid(margin_P).sum() / batch.pairs_in_step
    with torch.no_grad():  # metrics only
        return loss, PreferenceMetrics(
            right=int((margin_P > 0).sum().item()),
            margin=margin_P.sum().item(),
            chosen_reward=chosen_P.sum().item(),
            rejected_reward=rejected_P.sum().item(),
        )
