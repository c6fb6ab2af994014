"""The optimizer: its moments belong to one phase of one update, and gradients are clipped once a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from art_patch.training import TrainGroup
from art_patch.training.loop.job import plan_of
from art_patch.training.loop.loading import load_policy
from art_patch.training.loop.processes import ALONE
from art_patch.training.loop.update import Learner, learning_rate_share, update
from tests.support.train_jobs import SMALL, make_job, random_groups, weights_of

RATE = 1e-3
"""What Adam moves each weight by in its first step, whatever the gradient: later steps depend on those before."""


@pytest.fixture(scope="module")
def groups(base: Path) -> tuple[TrainGroup, ...]:
    return random_groups(base, groups=4, siblings=3)


def learned(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def moved(learner: Learner, model: Any, gradient: float, number: int) -> set[float]:
    """How far each weight goes in a step of this gradient."""
    before = {name: weight.detach().clone() for name, weight in learned(model).items()}
    for weight in learned(model).values():
        weight.grad = torch.full_like(weight, gradient)
    learner.step(number)
    return {
        round(each, 6) for name, weight in learned(model).items() for each in (weight - before[name]).flatten().tolist()
    }


def test_a_phase_begins_without_the_moments_of_the_one_before(base: Path):
    model = load_policy(str(base), None, SMALL)
    learner = Learner(model, replace(SMALL, learning_rate=RATE))
    assert moved(learner, model, 1.0, 0) == {-RATE}
    moved(learner, model, 1.0, 1)
    assert moved(learner, model, -0.1, 2) != {RATE}  # moments of the steps before are at work
    assert moved(learner, model, -0.1, 0) == {RATE}  # and not in a new phase


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        ("constant", [1 / 3, 2 / 3, 1, 1, 1, 1]),
        ("linear", [1 / 3, 2 / 3, 1, 3 / 4, 2 / 4, 1 / 4]),
        ("cosine", [1 / 3, 2 / 3, 1, (1 + 0.5**0.5) / 2, 1 / 2, (1 - 0.5**0.5) / 2]),
    ],
)
def test_the_learning_rate_rises_and_then_falls_as_its_schedule_says(schedule: Any, shares: list[float]):
    config = replace(SMALL, warmup_steps=2, lr_schedule=schedule)
    assert [learning_rate_share(config, number, 6) for number in range(6)] == pytest.approx(shares)
    assert learning_rate_share(config, 0, 1) == pytest.approx(1 / 3)
    assert learning_rate_share(replace(config, warmup_steps=0), 0, 1) == 1.0


def test_each_phase_has_a_schedule_of_its_own(base: Path, groups: tuple[TrainGroup, ...], tmp_path: Path):
    model = load_policy(str(base), None, SMALL)
    learner = Learner(model, replace(SMALL, learning_rate=RATE, lr_schedule="linear"))
    assert [len(moved(learner, model, 1.0, number)) for number in (0, 0)] == [1, 1]
    job = make_job(base, tmp_path / "agent@1", groups, epochs=2, minibatches=4, total_steps=6)
    assert [(step.number, step.of) for step in plan_of(job)] == [(number, 6) for number in range(6)]


def test_weights_decay_if_they_are_to(base: Path):
    model = load_policy(str(base), None, SMALL)
    before = {name: weight.detach().clone() for name, weight in learned(model).items()}
    moved(Learner(model, replace(SMALL, learning_rate=RATE, weight_decay=10.0)), model, 0.0, 0)
    for name, weight in learned(model).items():
        torch.testing.assert_close(weight.detach(), before[name] * (1 - RATE * 10.0))


def test_an_update_of_a_parent_begins_without_the_parents_moments(
    base: Path, groups: tuple[TrainGroup, ...], tmp_path: Path
):
    adapters = tmp_path / "adapters"
    changes: dict[str, Any] = {"learning_rate": RATE, "max_kl_nats": None}
    update(make_job(base, adapters / "agent@1", groups, **changes, epochs=4), tmp_path / "1")
    update(make_job(base, adapters / "agent@2", groups, **changes, parent=adapters / "agent@1"), tmp_path / "2")
    before, after = weights_of(adapters / "agent@1"), weights_of(adapters / "agent@2")
    far = torch.cat([(after[name] - before[name]).abs().flatten() for name in before])
    # where a gradient is far above Adam's epsilon, the first step is the learning rate
    assert far.median().item() == pytest.approx(RATE, rel=1e-3)
    assert far.max().item() == pytest.approx(RATE, rel=1e-3)


def test_gradients_are_scaled_down_once_a_step_after_all_micro_batches(
    base: Path, groups: tuple[TrainGroup, ...], tmp_path: Path
):
    found: list[list[float]] = []
    for tokens in (16_384, 1):
        job = make_job(
            base, tmp_path / "adapters" / f"agent@{tokens}", groups,
            epochs=3, micro_batch_tokens=tokens, max_grad_norm=0.1, learning_rate=RATE,
        )  # fmt: skip
        found.append([step["grad_norm"] for step in update(job, tmp_path / f"{tokens}").history])
    whole, cut = found
    assert cut == pytest.approx(whole, rel=1e-4)  # what the norm was of all of them, before
    assert min(whole) > 0.5
    model = load_policy(str(base), None, SMALL)
    learner = Learner(model, replace(SMALL, max_grad_norm=0.1))
    for weight in learned(model).values():
        weight.grad = torch.ones_like(weight)
    number = sum(weight.numel() for weight in learned(model).values())
    assert learner.clip(ALONE) == pytest.approx(number**0.5)
    grads = [weight.grad for weight in learned(model).values() if weight.grad is not None]
    assert float(torch.nn.utils.get_total_norm(grads)) == pytest.approx(0.1, rel=1e-4)
