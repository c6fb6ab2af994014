"""An evaluation says what plain forwards say, of groups that nothing is learned from, and changes nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from art_patch.training import LossConfig, Sibling, TrainGroup
from art_patch.training.loop.metrics import UpdateMetrics
from art_patch.training.loop.update import update
from tests.support.train_jobs import make_job, plain_logprobs, plain_model, random_groups, weights_of

EIGHT_STEPS: dict[str, Any] = {"epochs": 2, "minibatches": 4, "checkpoint_every_s": 0.0, "max_kl_nats": None}
EVAL = ("eval_loss", "eval_kl_nats", "eval_gain_nats")


@pytest.fixture(scope="module")
def groups(base: Path) -> tuple[TrainGroup, ...]:
    return random_groups(base, groups=4, siblings=3)


@pytest.fixture(scope="module")
def others(base: Path) -> tuple[TrainGroup, ...]:
    return random_groups(base, groups=2, siblings=3, seed=7)


def evaluated(metrics: UpdateMetrics) -> dict[int, list[float]]:
    """By the number of steps made."""
    return {n: [f[name] for name in EVAL] for n, f in enumerate(metrics.history, 1) if "eval_loss" in f}


def same(adapters: Path, one: int, other: int) -> bool:
    first, second = (weights_of(adapters / f"agent@{step}") for step in (one, other))
    return all(torch.equal(first[name], second[name]) for name in first)


def test_it_says_what_plain_forwards_say(
    base: Path, groups: tuple[TrainGroup, ...], others: tuple[TrainGroup, ...], tmp_path: Path
):
    target = tmp_path / "adapters" / "agent@1"
    held = LossConfig(clip_low=0.9, clip_high=1e6, kl_coefficient=0.1, kl_estimator="k1")
    job = make_job(base, target, groups, evaluation=others, eval_steps=99, loss=held, **EIGHT_STEPS)
    metrics = update(job, tmp_path / "job")
    before, after = plain_model(base), plain_model(base, target)
    loss, kl, gain = [], [], []
    for example in (sibling.example for group in others for sibling in group.siblings):
        for row in example.rows:
            for old, new in zip(plain_logprobs(before, row), plain_logprobs(after, row), strict=True):
                moved = new - old
                loss.append(math.exp(moved) * (-example.advantage + 0.1 * moved))
                kl.append(moved**2 / 2)
                gain.append(example.advantage * moved)
    plain = [sum(each) / len(each) for each in (loss, kl, gain)]
    assert evaluated(metrics) == {8: pytest.approx(plain, rel=1e-4, abs=1e-6)}
    assert [getattr(metrics, name) for name in EVAL] == evaluated(metrics)[8]
    assert metrics.tokens == sum(each.example.sampled for group in groups for each in group.siblings)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_it_comes_every_so_many_steps_and_at_the_end_and_changes_no_bit(
    base: Path, groups: tuple[TrainGroup, ...], others: tuple[TrainGroup, ...], tmp_path: Path, dropout: float
):
    said: list[str] = []
    adapters, changes = tmp_path / "adapters", EIGHT_STEPS | {"lora_dropout": dropout}
    without = update(make_job(base, adapters / "agent@1", groups, evaluation=others, **changes), tmp_path / "1")
    job = make_job(base, adapters / "agent@2", groups, evaluation=others, eval_steps=3, **changes)

    def die(done: int, total: int, note: str) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        update(job, tmp_path / "2", progress=die)
    metrics = update(job, tmp_path / "2", progress=lambda done, total, note: said.append(note))
    assert (evaluated(without), without.eval_loss) == ({}, None)
    assert list(evaluated(metrics)) == [3, 6, 8]
    assert ["on other groups: loss " in note for note in said] == [False, False, True, False, True]
    assert same(adapters, 1, 2)


def test_an_update_that_ends_early_is_evaluated_as_it_is_published(
    base: Path, groups: tuple[TrainGroup, ...], others: tuple[TrainGroup, ...], tmp_path: Path
):
    adapters, found = tmp_path / "adapters", []
    for step, changes in enumerate(({"max_kl_nats": 1e-5}, {"total_steps": 1}), start=1):
        job = make_job(
            base, adapters / f"agent@{step}", groups, evaluation=others, eval_steps=5, **EIGHT_STEPS | changes
        )
        found.append(update(job, tmp_path / f"{step}"))
    assert [metrics.steps for metrics in found] == [1, 1]
    assert found[0].stopped is not None
    assert evaluated(found[0]) == evaluated(found[1])
    assert list(evaluated(found[0])) == [1]


@pytest.mark.parametrize("after", [None, 3])
def test_an_update_stops_early_and_publishes_the_best_of_its_evaluations(
    base: Path, groups: tuple[TrainGroup, ...], tmp_path: Path, after: int | None
):
    adapters, changes = tmp_path / "adapters", EIGHT_STEPS | {"learning_rate": 3e-2}
    # the opposite of what is learned, so that it becomes worse from the first step on
    worse = [replace(g, id=f"{g.id}-not", siblings=tuple(map(opposite, g.siblings))) for g in groups]
    job = make_job(base, adapters / "agent@1", groups, evaluation=worse, eval_steps=1, early_stop=3, **changes)

    def die(done: int, total: int, note: str) -> None:
        if done == after:
            raise KeyboardInterrupt

    if after is not None:
        with pytest.raises(KeyboardInterrupt):
            update(job, tmp_path / "1", progress=die)
    metrics = update(job, tmp_path / "1")
    losses = {n: found[0] for n, found in evaluated(metrics).items()}
    best = min(losses, key=lambda n: losses[n])
    assert metrics.steps == best + 3 < 8
    assert metrics.stopped is not None and f"that of step {best}" in metrics.stopped and "early_stop" in metrics.stopped
    assert metrics.eval_loss == losses[best]
    shorter = make_job(base, adapters / "agent@2", groups, evaluation=worse, total_steps=best, **changes)
    update(shorter, tmp_path / "2")
    assert same(adapters, 1, 2)


def test_an_update_that_becomes_better_does_not_stop(base: Path, groups: tuple[TrainGroup, ...], tmp_path: Path):
    job = make_job(
        base, tmp_path / "adapters" / "agent@1", groups, evaluation=groups, eval_steps=1, early_stop=3, **EIGHT_STEPS
    )
    metrics = update(job, tmp_path / "job")
    assert (metrics.steps, metrics.stopped) == (8, None)
    assert metrics.eval_loss == min(found[0] for found in evaluated(metrics).values())


def opposite(sibling: Sibling) -> Sibling:
    return replace(sibling, example=replace(sibling.example, advantage=-sibling.example.advantage))


def test_with_nothing_to_evaluate_on_there_are_no_metrics(base: Path, groups: tuple[TrainGroup, ...], tmp_path: Path):
    job = make_job(base, tmp_path / "adapters" / "agent@1", groups, eval_steps=1)
    assert evaluated(update(job, tmp_path / "job")) == {}
