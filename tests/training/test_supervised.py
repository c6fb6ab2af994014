"""The losses against numbers worked out by hand, finite differences, and the losses of transformers and TRL."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from art_patch.training.losses import (
    PreferenceInput,
    PreferenceMetrics,
    SftInput,
    SftMetrics,
    preference_loss,
    sft_loss,
    sums_R,
)


def doubles(*values: float, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


# imitation


def test_imitation_is_the_mean_negative_log_likelihood():
    logprob_N = doubles(-0.5, -1.5, -2.0, grad=True)
    loss, metrics = sft_loss(SftInput(logprob_N, tokens_in_step=4))
    loss.backward()
    assert (loss.item(), metrics) == (1.0, SftMetrics(nll_nats=4.0))
    assert logprob_N.grad is not None
    assert logprob_N.grad.tolist() == [-0.25] * 3


def test_micro_batches_add_up_to_the_loss_of_transformers():
    from transformers.loss.loss_utils import ForCausalLMLoss

    generator = torch.Generator().manual_seed(0)
    logits_BTV = torch.randn(2, 5, 7, generator=generator)
    labels_BT = torch.tensor([[-100, -100, 3, 4, -100], [-100, 2, 1, -100, 6]])
    expected = ForCausalLMLoss(logits_BTV, labels_BT, vocab_size=7)
    total = 0.0
    for logits_TV, labels_T in zip(logits_BTV, labels_BT, strict=True):
        places = (labels_T != -100).nonzero().squeeze(1)
        logprob_N = torch.log_softmax(logits_TV[places - 1], -1).gather(1, labels_T[places, None]).squeeze(1)
        total += sft_loss(SftInput(logprob_N, tokens_in_step=5))[0].item()
    assert total == pytest.approx(expected.item(), abs=1e-6)


# preference


def pairs(
    chosen: Tensor, rejected: Tensor, chosen_reference: Tensor, rejected_reference: Tensor, *, step: int = 1
) -> PreferenceInput:
    return PreferenceInput(chosen, rejected, chosen_reference, rejected_reference, beta=0.1, pairs_in_step=step)


def test_a_pair_by_hand():
    # rewards .1 * (-5 + 7) = .2 and .1 * (-9 + 6) = -.3
    loss, metrics = preference_loss(pairs(doubles(-5), doubles(-9), doubles(-7), doubles(-6)))
    assert loss.item() == pytest.approx(-math.log(1 / (1 + math.exp(-0.5))))
    assert metrics == PreferenceMetrics(
        right=1,
        margin=pytest.approx(0.5),
        chosen_reward=pytest.approx(0.2),
        rejected_reward=pytest.approx(-0.3),
    )


def test_at_the_reference_nothing_is_preferred_and_the_gradient_is_half_of_beta():
    chosen_P, rejected_P = doubles(-3, -4, grad=True), doubles(-5, -6, grad=True)
    batch = pairs(chosen_P, rejected_P, chosen_P.detach(), rejected_P.detach(), step=2)
    loss, metrics = preference_loss(batch)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2))
    assert metrics == PreferenceMetrics(right=0, margin=0.0, chosen_reward=0.0, rejected_reward=0.0)
    assert chosen_P.grad is not None and rejected_P.grad is not None
    assert chosen_P.grad.tolist() == pytest.approx([-0.025, -0.025])  # -beta * sigmoid(0) / 2 pairs
    assert rejected_P.grad.tolist() == pytest.approx([0.025, 0.025])


def test_far_apart_nothing_overflows():
    chosen_P = torch.tensor([-1e4], requires_grad=True)
    loss, _ = preference_loss(pairs(chosen_P, torch.zeros(1), torch.zeros(1), torch.tensor([-1e4])))
    loss.backward()
    assert loss.item() == pytest.approx(2_000.0)
    assert chosen_P.grad is not None
    assert chosen_P.grad.item() == pytest.approx(-0.1)


def test_finite_differences_agree():
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(6, dtype=torch.float64, generator=generator) * 5 for _ in range(4)]
    learned = given[0].requires_grad_(), given[1].requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: preference_loss(pairs(a, b, given[2], given[3]))[0], learned)
    logprob_N = torch.randn(6, dtype=torch.float64, generator=generator, requires_grad=True)
    rows_N = torch.tensor([0, 0, 2, 1, 2, 2])
    assert torch.autograd.gradcheck(lambda x: sums_R(x, rows_N, 3), (logprob_N,))


@given(st.integers(1, 6), st.integers(0, 2**31))
def test_micro_batches_of_pairs_add_up(parts: int, seed: int):
    given_P = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    whole, metrics = preference_loss(pairs(*given_P, step=6))
    pieces = [preference_loss(pairs(*piece, step=6)) for piece in given_P.chunk(parts, dim=1)]
    assert sum(loss.item() for loss, _ in pieces) == pytest.approx(whole.item())
    assert sum(each.right for _, each in pieces) == metrics.right
    assert math.fsum(each.margin for _, each in pieces) == pytest.approx(metrics.margin)


def test_what_is_marked_is_summed_by_row():
    logprob_N = doubles(-1, -2, -3, -4)
    assert sums_R(logprob_N, torch.tensor([0, 2, 0, 2]), 3).tolist() == [-4, 0, -6]
