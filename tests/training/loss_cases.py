"""Losses and steps that several tests go through."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from art_patch.training import LossConfig
from art_patch.training.loss_config import LOSSES
from art_patch.training.losses import LossMetrics, policy_loss
from tests.training.plain_loss import Token, loss_input


def every_config(**settings: Any) -> list[LossConfig]:
    return [LossConfig(name=name, level=level, **settings) for name in LOSSES for level in LOSSES[name].levels]


EVERYTHING_ON = [
    config
    for estimator in ("k1", "k2", "k3")
    for config in every_config(kl_coefficient=0.3, kl_estimator=estimator, importance_cap=1.5, off_policy_nats=0.1)
] + [LossConfig(name="dapo", clip_max=1.6, importance_cap=None)]
CONFIGS = every_config() + EVERYTHING_ON


def name_of(config: LossConfig) -> str:
    return "-".join(
        [config.name, config.ratio_level]
        + ([f"kl_{config.kl_estimator}"] if config.kl_coefficient else [])
        + (["clip_max"] if config.clip_max else [])
    )


def evaluate(tokens: Sequence[Token], config: LossConfig, **step: Any) -> tuple[float, list[float], LossMetrics]:
    """Loss, its gradient at each token, metrics."""
    batch = loss_input(tokens, **step)
    loss, metrics = policy_loss(batch, config)
    loss.backward()
    assert batch.logprob_N.grad is not None
    return loss.item(), batch.logprob_N.grad.tolist(), metrics


def same(value: Any) -> Any:
    return pytest.approx(value, rel=1e-9, abs=1e-12)


def on_policy(*ratios: float, advantage: float = 1.0, trajectory: int = 0) -> list[Token]:
    """Tokens with these ratios to a policy that gave each -1 nat and was the one that sampled."""
    return [Token(-1 + math.log(ratio), -1, -1, advantage, trajectory) for ratio in ratios]
