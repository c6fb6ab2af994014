"""What must hold for every batch and every loss, absurd log-probabilities and long trajectories included."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from art_patch.training import LossConfig
from art_patch.training.losses import LossMetrics, policy_loss
from tests.training.loss_cases import CONFIGS, evaluate, every_config, name_of, on_policy, same
from tests.training.plain_loss import Token, loss_input

nats = st.floats(-3.0, -0.01)


@st.composite
def steps(draw: st.DrawFn) -> list[Token]:
    return [
        Token(draw(nats), draw(nats), draw(nats), advantage, trajectory, draw(nats))
        for trajectory, advantage in enumerate(draw(st.lists(st.floats(-3, 3), min_size=1, max_size=5)))
        for _ in range(draw(st.integers(1, 4)))
    ]


configs = st.sampled_from(CONFIGS)


@given(steps(), configs, st.randoms(use_true_random=False))
def test_micro_batches_of_whole_trajectories_add_up_to_the_whole(
    tokens: list[Token], config: LossConfig, rng: random.Random
):
    loss, gradient, metrics = evaluate(tokens, config)
    trajectories = 1 + max(token.trajectory for token in tokens)
    part_of = [rng.randrange(3) for _ in range(trajectories)]
    total, pieces, summed = 0.0, [0.0] * len(tokens), asdict(LossMetrics())
    for part in set(part_of):
        places = [n for n, token in enumerate(tokens) if part_of[token.trajectory] == part]
        its_loss, its_gradient, its_metrics = evaluate(
            [tokens[n] for n in places],
            config,
            tokens_in_step=len(tokens),
            trajectories_in_step=trajectories,
        )
        total += its_loss
        summed = {name: value + summed[name] for name, value in asdict(its_metrics).items()}
        for n, value in zip(places, its_gradient, strict=True):
            pieces[n] = value
    assert total == same(loss)
    assert pieces == same(gradient)
    assert summed == same(asdict(metrics))


@given(steps(), configs, st.randoms(use_true_random=False))
def test_the_order_of_tokens_and_the_names_of_trajectories_mean_nothing(
    tokens: list[Token], config: LossConfig, rng: random.Random
):
    loss, gradient, metrics = evaluate(tokens, config)
    order = rng.sample(range(len(tokens)), len(tokens))
    trajectories = 1 + max(token.trajectory for token in tokens)
    names = rng.sample(range(trajectories), trajectories)
    shuffled = [replace(tokens[n], trajectory=names[tokens[n].trajectory]) for n in order]
    loss_2, gradient_2, metrics_2 = evaluate(shuffled, config)
    assert loss_2 == same(loss)
    assert gradient_2 == same([gradient[n] for n in order])
    assert asdict(metrics_2) == same(asdict(metrics))


@given(
    steps(),
    configs,
    st.sampled_from(["logprob", "old", "recorded", "reference"]),
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.data(),
)
def test_a_token_that_is_not_finite_is_as_if_it_were_not_there_and_has_no_gradient(
    tokens: list[Token], config: LossConfig, field: Any, value: float, data: st.DataObject
):
    victim = data.draw(st.integers(0, len(tokens) - 1))
    step = {"tokens_in_step": len(tokens), "trajectories_in_step": 1 + max(token.trajectory for token in tokens)}
    poisoned = [replace(token, **{field: value}) if n == victim else token for n, token in enumerate(tokens)]
    loss, gradient, metrics = evaluate(poisoned, config, **step)
    assert gradient.pop(victim) == 0.0
    assert metrics.not_finite == 1
    without = tokens[:victim] + tokens[victim + 1 :]
    if without:
        loss_2, gradient_2, metrics_2 = evaluate(without, config, **step)
        assert (loss, gradient) == (loss_2, gradient_2)
        assert metrics == replace(metrics_2, not_finite=1)
    else:
        assert (loss, metrics) == (0.0, LossMetrics(not_finite=1))


absurd = st.sampled_from([0.0, -math.inf, math.nan, -1e4, -0.5])


@given(
    st.lists(st.tuples(absurd, absurd, absurd, absurd, st.integers(0, 2)), min_size=1, max_size=8),
    st.lists(st.floats(-3, 3), min_size=3, max_size=3),
    configs,
)
def test_absurd_log_probabilities_give_a_finite_loss_and_a_finite_gradient_in_fp32(
    rows: list[tuple[float, float, float, float, int]], advantages: list[float], config: LossConfig
):
    tokens = [Token(*row[:3], advantages[row[4]], row[4], row[3]) for row in rows]
    loss, gradient, metrics = evaluate(tokens, config, trajectories_in_step=3, dtype=torch.float32)
    assert math.isfinite(loss)
    assert all(map(math.isfinite, gradient))
    assert all(map(math.isfinite, asdict(metrics).values()))
    lost = [not all(map(math.isfinite, row[:4])) for row in rows]
    assert (metrics.not_finite, metrics.tokens) == (sum(lost), len(rows) - sum(lost))
    assert all(value == 0.0 for value, gone in zip(gradient, lost, strict=True) if gone)


@pytest.mark.parametrize("advantage", [math.nan, math.inf])
@pytest.mark.parametrize("config", every_config(), ids=name_of)
def test_an_advantage_that_is_not_finite_is_not_hidden(config: LossConfig, advantage: float):
    assert not math.isfinite(evaluate(on_policy(0.9, 1.1, advantage=advantage), config)[0])


def test_rounding_between_server_and_trainer_costs_long_trajectories_nothing(
    record_property: Callable[[str, object], None],
):
    """Noise of .02 nats a token over 4096 tokens: weights of tokens keep it all, a product over the trajectory a fifth.

    The product, as TRL's default takes it, is computed here beside it.
    """
    generator = torch.Generator().manual_seed(0)
    trajectories, length, sigma = 64, 4096, 0.02
    noise_ST = sigma * torch.randn(trajectories, length, generator=generator)
    logprob_N = torch.full((trajectories * length,), -1.0)
    batch = replace(
        loss_input([Token(0, 0, 0, 1.0, 0)]),
        logprob_N=logprob_N.clone().requires_grad_(),
        old_N=logprob_N,
        recorded_N=logprob_N - noise_ST.flatten(),
        advantage_N=torch.ones_like(logprob_N),
        trajectory_N=torch.arange(trajectories).repeat_interleave(length),
        tokens_in_step=trajectories * length,
        trajectories_in_step=trajectories,
        reference_N=None,
    )
    loss, metrics = policy_loss(batch, LossConfig())
    loss.backward()
    assert batch.logprob_N.grad is not None
    weight_N = -batch.logprob_N.grad * batch.tokens_in_step  # what each token really weighs
    share = (weight_N.sum() ** 2 / (len(weight_N) * weight_N.square().sum())).item()
    many = 200_000  # sums of such noise, drawn as what they are: normal, with sigma sqrt(length)
    product_S = torch.exp(sigma * length**0.5 * torch.randn(many, generator=generator))
    product_share = (product_S.sum() ** 2 / (many * product_S.square().sum())).item()
    kept_S = product_S * (product_S <= 3)
    masked_share = (kept_S.sum() ** 2 / (many * kept_S.square().sum())).item()
    record_property("figure", ["effective share, noise .02 x 4096 tokens: token weights", f"{share:.4f}", ">= 0.90"])
    record_property("figure", ["  product over the trajectory", f"{product_share:.3f}", ""])
    record_property("figure", ["  that, above 3 masked (TRL's default)", f"{masked_share:.3f}", ""])
    assert share >= 0.90
    assert weight_N.mean().item() >= 0.95
    assert metrics.effective_share == pytest.approx(share, rel=1e-4)
    assert max(product_share, masked_share) < 0.6
