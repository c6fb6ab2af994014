"""Parity with TRL: its trainer and our loss on the same recorded rows and the same tiny model, in fp32.

Our log-probabilities come from the plain way: each row alone, all logits, `log_softmax`, `gather`. Compared are the
loss, the gradient of every LoRA weight, and the advantages. Tried with TRL 1.16.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from art_patch.training import LossConfig, LossName, advantages_of_groups
from art_patch.training.loss_config import LOSSES, Scale
from art_patch.training.losses import LossInput, policy_loss

pytest.importorskip("trl", reason="TRL is not installed, so nothing is compared with it; pip install 'trl>=1.16,<2'")

from tests.training.trl_oracle import Oracle, Rollout, make_oracle

TOLERANCE = 1e-5
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return make_oracle(tmp_path_factory.mktemp("oracle"))


@pytest.fixture(scope="module")
def rollouts(oracle: Oracle) -> list[Rollout]:
    """Ragged rows with tool results in them, sampled by a policy some way off the model's."""
    rng = random.Random(0)
    made: list[Rollout] = []
    for advantage in (1.3, -0.7, 0.4, -1.6, 0.9, -0.2, -1.1, 0.0):
        prompt = tuple(rng.randrange(3, 300) for _ in range(rng.randint(2, 7)))
        length = rng.randint(3, 12)
        sampled_C = (True, *(rng.random() < 0.75 for _ in range(length - 1)))
        row = Rollout(prompt, tuple(rng.randrange(3, 300) for _ in range(length)), sampled_C, (), (), (), advantage)
        with torch.no_grad():
            now = logprobs_C(oracle.model, row).tolist()
        old = [x + rng.gauss(0.0, 0.25) for x in now]
        recorded = [x + rng.gauss(0.0, 0.25) - 2.0 * (rng.random() < 0.2) for x in old]  # some beyond the cap of 3
        reference = [x + rng.gauss(0.0, 0.3) for x in now]
        made.append(replace(row, old_C=tuple(old), recorded_C=tuple(recorded), reference_C=tuple(reference)))
    return made


def logprobs_C(model: Any, row: Rollout) -> torch.Tensor:
    ids = torch.tensor([row.prompt + row.completion])
    logits = model(input_ids=ids).logits[0, len(row.prompt) - 1 : -1]
    return torch.log_softmax(logits.float(), dim=-1).gather(1, torch.tensor(row.completion)[:, None]).squeeze(1)


def loss_input(model: Any, rollouts: Sequence[Rollout]) -> LossInput:
    def column(name: str) -> torch.Tensor:
        return torch.tensor(
            [x for row in rollouts for x, s in zip(getattr(row, name), row.sampled_C, strict=True) if s]
        )

    counts = torch.tensor([sum(row.sampled_C) for row in rollouts])
    return LossInput(
        logprob_N=torch.cat([logprobs_C(model, row)[torch.tensor(row.sampled_C)] for row in rollouts]),
        old_N=column("old_C"),
        recorded_N=column("recorded_C"),
        advantage_N=torch.tensor([row.advantage for row in rollouts]).repeat_interleave(counts),
        trajectory_N=torch.arange(len(rollouts)).repeat_interleave(counts),
        tokens_in_step=int(counts.sum()),
        trajectories_in_step=len(rollouts),
        reference_N=column("reference_C"),
    )


def differences(
    oracle: Oracle,
    rollouts: Sequence[Rollout],
    config: LossConfig,
    *,
    loss_type: str | None = None,
    batch: dict[str, Any] | None = None,
) -> tuple[float, float]:
    """Relative difference of the losses, and the largest of any LoRA weight's gradients."""
    theirs = oracle.loss(batch or oracle.batch(rollouts, config), config, loss_type)
    theirs.backward()
    their_gradients = oracle.gradients()
    ours, _ = policy_loss(loss_input(oracle.model, rollouts), config)
    ours.backward()
    our_gradients = oracle.gradients()
    assert our_gradients.keys() == their_gradients.keys()
    assert len(our_gradients) == 28, "A and B of seven linear layers in two blocks"
    worst = max(relative(our_gradients[name], their) for name, their in their_gradients.items())
    return relative(ours.detach(), theirs.detach()), worst


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def check(found: Iterable[tuple[str, tuple[float, float]]], record_property: Record, what: str) -> None:
    named = dict(found)
    loss, gradient = (max(pair[i] for pair in named.values()) for i in (0, 1))
    record_property(
        "figure",
        [f"TRL parity, {what}: {len(named)} cases, loss / gradient", f"{loss:.1e} / {gradient:.1e}", f"<= {TOLERANCE}"],
    )
    assert {name: pair for name, pair in named.items() if not max(pair) <= TOLERANCE} == {}


# The papers' clips of GSPO and LUSPO are so narrow that hardly a token here gets through them.
CLIPS: list[dict[str, Any]] = [{}, {"clip_low": 0.05, "clip_high": 0.1}]


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_and_gradient_is_trls(
    oracle: Oracle, rollouts: list[Rollout], name: LossName, record_property: Record
):
    check(
        (
            (f"{level}, cap {cap}, kl {kl}, {clip}", differences(oracle, rollouts, config))
            for level in LOSSES[name].levels
            for cap in (None, 3.0)
            for kl in (0.0, 0.04)
            for clip in CLIPS
            if not clip or LOSSES[name].surrogate == "clip"
            for config in [LossConfig(name=name, level=level, importance_cap=cap, kl_coefficient=kl, **clip)]
        ),
        record_property,
        name,
    )


def test_trls_bnpo_is_dapo_where_the_micro_batch_is_the_step(
    oracle: Oracle, rollouts: list[Rollout], record_property: Record
):
    check(
        (
            (f"{level}, cap {cap}", differences(oracle, rollouts, config, loss_type="bnpo"))
            for level in LOSSES["dapo"].levels
            for cap in (None, 3.0)
            for config in [LossConfig(level=level, importance_cap=cap, kl_coefficient=0.04)]
        ),
        record_property,
        "bnpo",
    )


def test_trls_delta_is_clip_max(oracle: Oracle, rollouts: list[Rollout], record_property: Record):
    check(
        (
            (f"{name}, cap {cap}, kl {kl}", differences(oracle, rollouts, config))
            for name in ("dapo", "grpo", "luspo")
            for cap in (None, 3.0)
            for kl in (0.0, 0.04)
            for config in [LossConfig(name=name, level="token", clip_max=1.4, importance_cap=cap, kl_coefficient=kl)]
        ),
        record_property,
        "delta",
    )
    _, metrics = policy_loss(loss_input(oracle.model, rollouts), LossConfig(clip_max=1.4))
    _, without = policy_loss(loss_input(oracle.model, rollouts), LossConfig())
    assert metrics.clipped_high > without.clipped_high, "it must make a difference"


def test_trls_off_policy_sequence_mask(oracle: Oracle, rollouts: list[Rollout], record_property: Record):
    far = [replace(row, recorded_C=tuple(x + 1.1 for x in row.recorded_C)) for row in rollouts]
    config = LossConfig(off_policy_nats=0.3)
    _, metrics = policy_loss(loss_input(oracle.model, far), config)
    assert 0 < metrics.dropped_trajectories < sum(row.advantage < 0 for row in rollouts), "it must make a difference"
    check(
        (
            (f"{name}, cap {cap}, kl {kl}", differences(oracle, far, replace(config, **changes)))
            for name in LOSSES
            for cap in (None, 3.0)
            for kl in (0.0, 0.04)
            for changes in [{"name": name, "importance_cap": cap, "kl_coefficient": kl}]
        ),
        record_property,
        "off-policy mask",
    )


REWARDS: dict[str, list[float | None]] = {
    "plain": [1.0, 0.0, 0.25, 0.5, 0.9, 0.8, 0.1, 0.4],
    "one group alike": [0.1, 0.1, 0.1, 0.1, 1.0, 0.0, 0.0, 0.0],
    "some unscored": [1.0, None, 0.0, 0.5, None, None, 0.2, 0.7],
}


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_trls_own_advantages_old_policy_and_importance_weights_give_the_same_step(
    oracle: Oracle, rollouts: list[Rollout], scale: Scale, record_property: Record
):
    """From rewards to gradients, all of TRL's intermediate steps its own."""
    config = LossConfig(importance_cap=2.0)
    with torch.no_grad():
        now = [tuple(logprobs_C(oracle.model, row).tolist()) for row in rollouts]
    found: dict[str, tuple[float, float]] = {}
    for what, rewards in REWARDS.items():
        batch = oracle.score(rollouts, rewards, scale, 2.0)
        groups = advantages_of_groups([rewards[:4], rewards[4:]], scale)
        ours_B = [a for group in groups for a in group or (0.0,) * 4]
        torch.testing.assert_close(batch["advantages"], torch.tensor(ours_B), atol=1e-6, rtol=0)
        recomputed = [
            replace(row, old_C=old, reference_C=old, advantage=advantage)
            for row, old, advantage in zip(rollouts, now, ours_B, strict=True)
        ]
        found[what] = differences(oracle, recomputed, config, batch=batch)
    check(found.items(), record_property, f"rewards to gradients, scale {scale}")
