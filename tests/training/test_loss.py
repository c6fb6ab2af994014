"""The losses: numbers worked out by hand, closed forms, and a second implementation."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from art_patch.training import LossConfig
from art_patch.training.loss_config import LOSSES
from art_patch.training.losses import LossMetrics, policy_loss
from tests.training.loss_cases import CONFIGS, evaluate, every_config, name_of, on_policy, same
from tests.training.plain_loss import Token, loss_input, plain_loss

THREE = on_policy(1.5, 0.9) + on_policy(0.5, advantage=-2.0, trajectory=1)
X, Y, Z = (-1 + math.log(ratio) for ratio in (1.5, 0.9, 0.5))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


BY_HAND = {
    # mean of -(1.2 + .9) / 2 and +2 * .8
    "grpo": (-1.05 + 1.6) / 2,
    "dr_grpo": (-1.2 - 0.9 + 1.6) / (2 * 1024),
    "dapo": (-1.28 - 0.9 + 1.6) / 3,
    "cispo": (-1.5 * X - 0.9 * Y + 2 * 0.5 * Z) / 3,
    # sequence ratios sqrt(1.35) and .5 are both far outside 1 - 3e-4, 1 + 4e-4
    "gspo": (-1.0004 + 2 * 0.9997) / 2,
    "sapo": ((-4 * sigmoid(0.5) - 4 * sigmoid(-0.1)) / 2 + 2 * 4 / 1.05 * sigmoid(-0.525)) / 2,
    "vespo": (-(1.35**2) * math.exp(3 * -0.35) * (X + Y) + 2 * 0.5**3 * math.exp(2 * 0.5) * Z) / 3,
    "luspo": (2 * -1.0025 + 2 * 0.998) / 2,
}


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_by_hand(name: Any):
    assert evaluate(THREE, LossConfig(name=name))[0] == same(BY_HAND[name])


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "flows", "low", "high"),
    [
        (1.5, 1.0, -1.28, False, 0, 1),  # already likelier than allowed: clipped, no gradient
        (1.5, -1.0, 1.5, True, 0, 0),  # a bad token that became likelier: goes on
        (0.5, 1.0, -0.5, True, 0, 0),  # a good token that became less likely: goes on
        (0.5, -1.0, 0.8, False, 1, 0),  # already pushed down far enough
        (1.2, 1.0, -1.2, True, 0, 0),
        (0.9, -1.0, 0.9, True, 0, 0),
        (9.0, -1.0, 3.0, False, 0, 1),  # a bad token far likelier than it was: clip_max
        (9.0, 1.0, -1.28, False, 0, 1),
        (9.0, 0.0, 0.0, False, 0, 0),
    ],
)
def test_clipping_by_hand(ratio: float, advantage: float, expected: float, flows: bool, low: int, high: int):
    tokens = on_policy(ratio, advantage=advantage)
    loss, (gradient,), metrics = evaluate(tokens, LossConfig(clip_max=3.0))
    assert loss == same(expected)
    assert gradient == same(-advantage * ratio if flows else 0.0)
    assert (metrics.clipped_low, metrics.clipped_high) == (low, high)


@pytest.mark.parametrize(("ratio", "weight", "high"), [(0.1, 0.1, 0), (1.0, 1.0, 0), (5.0, 5.0, 0), (8.0, 5.0, 1)])
def test_the_cap_of_cispo_bounds_the_ratio_itself_and_stops_no_gradient(ratio: float, weight: float, high: int):
    _, (gradient,), metrics = evaluate(on_policy(ratio, advantage=-2.0), LossConfig(name="cispo"))
    assert gradient == same(2.0 * weight)
    assert (metrics.clipped_low, metrics.clipped_high) == (0, high)


@pytest.mark.parametrize(("cap", "weights"), [(3.0, [1.0, 2.0, 3.0]), (1.5, [1.0, 1.5, 1.5]), (None, [1.0, 1.0, 1.0])])
def test_each_token_has_an_importance_weight_of_its_own_and_at_most_the_cap(cap: float | None, weights: list[float]):
    tokens = [Token(-1, -1, -1 - math.log(ratio), 1.0, 0) for ratio in (1.0, 2.0, 50.0)]
    _, gradient, metrics = evaluate(tokens, LossConfig(importance_cap=cap))
    assert gradient == same([-weight / 3 for weight in weights])
    assert metrics.weight == same(sum(weights))
    assert metrics.effective_share == same(sum(weights) ** 2 / 3 / sum(weight**2 for weight in weights))


def test_a_bad_trajectory_far_from_the_policy_that_sampled_it_is_not_learned_from_but_held_near_the_reference():
    far = [Token(-2.0, -1.0, -1.0, -1.0, 0, reference=-1.5), Token(-1.4, -1.0, -1.0, -1.0, 0, reference=-1.5)]
    near = [Token(-1.1, -1.0, -1.0, -1.0, 1, reference=-1.5)]
    good = [Token(-3.0, -1.0, -1.0, 1.0, 2, reference=-1.5)]
    config = LossConfig(off_policy_nats=0.6)  # the first trajectory's mean is 0.7
    _, gradient, metrics = evaluate(far + near + good, config)
    assert gradient[:2] == [0.0, 0.0]
    assert gradient[2:] == same([math.exp(-0.1) / 4, -math.exp(-2.0) / 4])
    assert (metrics.dropped_tokens, metrics.dropped_trajectories, metrics.clipped_low) == (2, 1, 0)
    _, gradient, _ = evaluate(far + near + good, replace(config, kl_coefficient=0.1))
    assert all(gradient)


def test_a_weight_is_a_factor_of_the_loss_and_of_what_it_is_divided_by():
    batch = loss_input(on_policy(1.1, 0.9) + on_policy(0.95, advantage=-2.0, trajectory=1))
    heavy = replace(batch, weight_N=torch.tensor([1.0, 1.0, 3.0], dtype=batch.logprob_N.dtype), tokens_in_step=5.0)
    loss, metrics = policy_loss(heavy, LossConfig())
    assert loss.item() == same((-1.1 - 0.9 + 3 * 2 * 0.95) / 5)
    assert metrics == policy_loss(batch, LossConfig())[1]


def test_the_metrics_are_sums_over_tokens():
    tokens = [Token(-1.0, -1.0, -1.5, 1.0, 0, reference=-1.0), Token(-2.0, -2.0, -2.0, 1.0, 0, reference=-1.0)]
    batch = replace(loss_input(tokens), entropy_N=torch.tensor([0.25, 0.5]))
    _, metrics = policy_loss(batch, LossConfig(importance_cap=None))
    assert metrics == LossMetrics(
        tokens=2,
        kl_nats=same(0.5**2 / 2),
        reference_kl_nats=same(math.exp(1.0) - 1 - 1.0),
        entropy_nats=same(0.75),
        weight=same(2.0),
        weight_squared=same(2.0),
    )


def test_a_rare_token_that_became_likely_is_no_far_policy():
    """By k3 it alone would be above 8 nats a token, and end the update that learned it."""
    tokens = [Token(-1.0, -1.0, -1.0, 1.0, 0)] * 999 + [Token(-0.5, -9.5, -9.5, 1.0, 0)]
    _, metrics = policy_loss(loss_input(tokens), LossConfig())
    assert metrics.kl_nats / metrics.tokens == same(9.0**2 / 2 / 1000)


# closed forms


@pytest.mark.parametrize("config", every_config(), ids=name_of)
def test_on_policy_every_loss_has_the_gradient_of_the_bandit(config: LossConfig):
    logits = torch.tensor([0.3, -0.2, 1.1], dtype=torch.float64, requires_grad=True)
    logprob = torch.log_softmax(logits, 0)[[1]]
    value = logprob.item()
    batch = replace(loss_input([Token(value, value, value, 2.0, 0)]), logprob_N=logprob)
    loss, _ = policy_loss(batch, config)
    loss.backward()
    expected = -2.0 * (torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64) - torch.softmax(logits.detach(), 0))
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, expected / config.settings.get("max_completion_tokens", 1))


def policy_of(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, 0)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_what_the_kl_term_descends_off_policy_is_the_kl(estimator: Any):
    """Expectation over all actions of a behaviour policy, exactly; no advantage."""
    torch.manual_seed(0)
    logits, behaviour, reference = torch.randn(3, 5, dtype=torch.float64)
    logits.requires_grad_()
    config = LossConfig(kl_coefficient=1.0, kl_estimator=estimator)
    expected_loss = torch.zeros((), dtype=torch.float64)
    measured = 0.0
    for action, probability in enumerate(policy_of(behaviour).exp().tolist()):
        sampled = policy_of(behaviour)[[action]]
        batch = replace(
            loss_input([Token(0, 0, 0, 0.0, 0)]),
            logprob_N=policy_of(logits)[[action]],
            old_N=sampled,
            recorded_N=sampled,
            reference_N=policy_of(reference)[[action]],
        )
        loss, metrics = policy_loss(batch, config)
        expected_loss = expected_loss + probability * loss
        measured += probability * metrics.reference_kl_nats
    log_ratio = policy_of(logits) - policy_of(reference)
    what = log_ratio.square() / 2 if estimator == "k2" else log_ratio
    exact = (policy_of(logits).exp() * what).sum()
    assert measured == same(exact.item())
    (found,) = torch.autograd.grad(expected_loss, logits, retain_graph=True)
    (wanted,) = torch.autograd.grad(exact, logits)
    torch.testing.assert_close(found, wanted)


# a second implementation, and finite differences of it


def random_tokens(seed: int, spread: float = 0.5) -> list[Token]:
    rng = random.Random(seed)
    advantages = [rng.uniform(-2, 2) for _ in range(4)]

    def near() -> float:
        return rng.uniform(-1 - spread, -1 + spread)

    return [
        Token(near(), near(), near(), advantage, trajectory, rng.uniform(-2, -0.5))
        for trajectory, advantage in enumerate(advantages)
        for _ in range(rng.randint(1, 4))
    ]


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_each_loss_agrees_with_a_second_implementation_and_its_finite_differences(config: LossConfig):
    for seed in range(3):
        tokens = random_tokens(seed)
        loss, gradient, _ = evaluate(tokens, config)
        assert loss == same(plain_loss(tokens, config))
        here = [token.logprob for token in tokens]
        for n, (x, found) in enumerate(zip(here, gradient, strict=True)):
            up, down = ([*here[:n], x + step, *here[n + 1 :]] for step in (1e-6, -1e-6))
            slope = (plain_loss(tokens, config, up) - plain_loss(tokens, config, down)) / 2e-6
            assert found == pytest.approx(slope, rel=1e-6, abs=1e-8), n


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.name not in ("cispo", "vespo")], ids=name_of)
def test_losses_without_constant_weights_pass_gradcheck(config: LossConfig):
    batch = loss_input(random_tokens(7))
    config = replace(config, off_policy_nats=None)  # dropping a trajectory is a step, not a slope

    def loss(logprob_N: torch.Tensor) -> torch.Tensor:
        return policy_loss(replace(batch, logprob_N=logprob_N), config)[0]

    assert torch.autograd.gradcheck(loss, (batch.logprob_N,))


def test_a_kl_term_needs_a_reference():
    with pytest.raises(ValueError, match="reference_N"):
        policy_loss(replace(loss_input(THREE), reference_N=None), LossConfig(kl_coefficient=0.1))
