"""The losses on given answers: imitation (SFT) and preference (DPO), computed from tensors of log-probabilities.

Both losses are means over the whole optimizer step, whose number of tokens or pairs is an argument. So the size of the
micro-batches changes the memory that is needed, and not the gradient. Metrics are sums over one micro-batch.

The suffix of a name gives the axes of a tensor: N learned tokens, R rows (token sequences), P pairs of rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SftInput:
    """Input of the imitation loss for one micro-batch."""

    logprob_N: Tensor  # log-probability of each learned token under the model, with gradient
    tokens_in_step: int  # number of learned tokens in the whole optimizer step


@dataclass(frozen=True, slots=True)
class SftMetrics:
    """Metrics of the imitation loss for one micro-batch."""

    nll_nats: float  # sum of the negative log-likelihoods of the micro-batch's learned tokens


def sft_loss(batch: SftInput) -> tuple[Tensor, SftMetrics]:
    """Returns the micro-batch's part of the step's mean negative log-likelihood over learned tokens, and metrics."""
    # The mean over tokens, not over answers: each token weighs the same, however long its answer is.
    nll = -batch.logprob_N.sum()
    return nll / batch.tokens_in_step, SftMetrics(nll.item())


def sums_R(logprob_N: Tensor, row_N: Tensor, rows: int) -> Tensor:
    """Returns, for each of `rows` rows (token sequences), the sum of the log-probabilities of its learned tokens.

    `row_N` holds the index of each token's row, from 0, on the device of `logprob_N`.
    """
    return logprob_N.new_zeros(rows).index_add(0, row_N, logprob_N)


@dataclass(frozen=True, slots=True)
class PreferenceInput:
    """P pairs of a better and a worse row in one micro-batch; a row's log-probability is that of `sums_R`."""

    chosen_P: Tensor  # log-probability of the better rows under the model, with gradient
    rejected_P: Tensor  # log-probability of the worse rows under the model, with gradient
    chosen_reference_P: Tensor  # log-probability of the better rows under the policy that the update starts from
    rejected_reference_P: Tensor  # log-probability of the worse rows under the policy that the update starts from
    beta: float  # of DPO; the larger it is, the nearer the model stays to the policy that the update starts from
    pairs_in_step: int  # number of pairs in the whole optimizer step


@dataclass(frozen=True, slots=True)
class PreferenceMetrics:
    """Metrics of the preference loss, as sums over the pairs of one micro-batch.

    The reward of a row (token sequence) is DPO's implicit reward: beta times the difference between the row's
    log-probability under the model and under the policy that the update starts from.
    """

    right: int  # number of pairs whose better row has the higher reward
    margin: float  # reward of the better row minus the reward of the worse row
    chosen_reward: float  # reward of the better row; if it becomes negative, the better answers became less likely
    rejected_reward: float  # reward of the worse row


def preference_loss(batch: PreferenceInput) -> tuple[Tensor, PreferenceMetrics]:
    """Returns the micro-batch's part of the DPO loss of its optimizer step, and the metrics.

    The loss is the mean over all pairs of `-log sigmoid(reward of the better row - reward of the worse row)`, equation
    7 of https://arxiv.org/abs/2305.18290. Label smoothing, normalisation by length, and an additional likelihood term
    of the better row are not implemented.
    """
    # A row's reward is beta times its log-ratio to the reference, whose log-probabilities carry no gradient.
    chosen_P = batch.beta * (batch.chosen_P - batch.chosen_reference_P)
    rejected_P = batch.beta * (batch.rejected_P - batch.rejected_reference_P)
    margin_P = chosen_P - rejected_P
    loss = -torch.nn.functional.logsigmoid(margin_P).sum() / batch.pairs_in_step
    with torch.no_grad():  # metrics only
        return loss, PreferenceMetrics(
            right=int((margin_P > 0).sum().item()),
            margin=margin_P.sum().item(),
            chosen_reward=chosen_P.sum().item(),
            rejected_reward=rejected_P.sum().item(),
        )
