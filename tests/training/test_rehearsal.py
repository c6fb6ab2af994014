"""Rehearsal in the update: beside groups, exactly what was drawn, and what was learned before is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from art_patch.training import Example, Row, Sibling, TrainGroup, TrainJob
from art_patch.training.loop.gradients import gradients_of, start_scores
from art_patch.training.loop.job import plan_of
from art_patch.training.loop.loading import load_policy
from art_patch.training.loop.processes import ALONE
from art_patch.training.loop.update import update
from art_patch.training.scoring import Scorer
from tests.support.train_jobs import (
    as_sampled,
    make_job,
    plain_logprobs,
    plain_model,
    random_groups,
    row,
    weights_of,
)

EARLIER = tuple(row((9, n), (40, 41, 42 + n), logprob=0.0) for n in range(12))


def gradients(job: TrainJob, directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Of the first step's groups, and of the rows that it rehearses."""
    model = load_policy(job.base, None, job.config)
    scorer = Scorer(model)
    start = start_scores(job, model, scorer, directory, ALONE)
    kinds, step = gradients_of(job, scorer, start, ALONE), plan_of(job)[0]
    found: list[dict[str, torch.Tensor]] = []
    for kind, items in (("groups", step.items), ("rehearse", step.rehearsed)):
        model.zero_grad(set_to_none=True)
        kinds[kind](items)
        found.append({name: w.grad.clone() for name, w in model.named_parameters() if w.grad is not None})
    return found[0], found[1]


def test_a_step_adds_the_gradient_of_the_rows_that_were_drawn(base: Path, tmp_path: Path):
    groups = random_groups(base, groups=2, siblings=3)
    changes: dict[str, Any] = {"rehearsal": EARLIER, "rehearse_from": 0.5, "rehearse_weight": 0.2}
    job = make_job(base, tmp_path / "adapters" / "agent@1", groups, **changes)
    (step,) = plan_of(job)
    assert len(step.rehearsed) == 8
    metrics = update(job, tmp_path / "job")
    of_groups, of_rehearsed = gradients(job, tmp_path / "apart")
    summed = [of_groups[name] + of_rehearsed[name] for name in of_groups]
    norm = torch.stack([grad.square().sum() for grad in summed]).sum().sqrt().item()
    assert metrics.grad_norm == pytest.approx(norm, rel=1e-5)
    drawn = [logprob for n in step.rehearsed for logprob in plain_logprobs(plain_model(base), EARLIER[n])]
    assert metrics.rehearse_nll_nats == pytest.approx(-sum(drawn) / 24, abs=1e-5)
    (step_metrics,) = metrics.history
    assert (metrics.rehearsed, step_metrics["rehearsed_tokens"]) == (12, 24)

    heavier = replace(job, config=replace(job.config, rehearse_weight=0.4))
    _, twice = gradients(heavier, tmp_path / "heavier")
    for name, grad in of_rehearsed.items():
        torch.testing.assert_close(2 * grad, twice[name])
    off = make_job(base, tmp_path / "adapters" / "agent@2", groups)
    alone = update(off, tmp_path / "off")
    assert (alone.loss, alone.kl_nats, alone.tokens) == (metrics.loss, metrics.kl_nats, metrics.tokens)
    assert step_metrics["computed_tokens"] > alone.history[0]["computed_tokens"]


def test_nothing_is_rehearsed_unless_it_is_asked_for(base: Path, tmp_path: Path):
    groups = random_groups(base, groups=2, siblings=3)
    plain = make_job(base, tmp_path / "adapters" / "agent@1", groups)
    off = make_job(base, tmp_path / "adapters" / "agent@2", groups, rehearsal=EARLIER)
    empty = make_job(base, tmp_path / "adapters" / "agent@3", groups, rehearse_from=0.5)
    for number, job in enumerate((plain, off, empty)):
        metrics = update(job, tmp_path / f"{number}")
        assert (metrics.rehearsed, metrics.rehearse_nll_nats) == (0, 0.0)
        assert not {"rehearsed_tokens", "rehearse_nll_nats"} & metrics.history[0].keys()
    first, *others = (weights_of(tmp_path / "adapters" / f"agent@{step}") for step in (1, 2, 3))
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


def test_demonstrations_are_rehearsed_beside_groups(base: Path, tmp_path: Path):
    groups = random_groups(base, groups=2, siblings=3)
    job = make_job(
        base, tmp_path / "adapters" / "agent@1", groups, demonstrations=EARLIER[:2], rehearse_from=0.5, epochs=2
    )
    metrics = update(job, tmp_path / "job")
    assert [step_metrics.get("rehearsed_tokens") for step_metrics in metrics.history] == [None, None, 6, 6]


def test_a_second_task_is_learned_without_forgetting_the_first(base: Path, tmp_path: Path):
    first, second = row((5, 6, 7), (20, 21), logprob=0.0), row((5, 6, 8), (60, 61))
    adapters = tmp_path / "adapters"
    parent = adapters / "agent@1"
    update(make_job(base, parent, (), demonstrations=(first,), epochs=40, learning_rate=2e-2), tmp_path / "1")
    model = plain_model(base, parent)
    said = ((second, 1.0), (row((5, 6, 8), (20, 21)), -1.0))
    siblings = tuple(Sibling(f"{a}", Example((as_sampled(model, each),), a), True) for each, a in said)
    changes: dict[str, Any] = {"parent": parent, "epochs": 10, "max_kl_nats": None}
    jobs = (
        make_job(base, adapters / "agent@2", [TrainGroup("g", siblings)], **changes),
        make_job(
            base, adapters / "agent@3", [TrainGroup("g", siblings)], rehearsal=(first,), rehearse_from=0.5, **changes
        ),
    )
    for job in jobs:
        update(job, tmp_path / job.target.name)

    def scores(said: Row) -> list[float]:
        return [sum(plain_logprobs(plain_model(base, adapters / f"agent@{step}"), said)) for step in (1, 2, 3)]

    before, without, rehearsed = scores(first)
    assert before > -3.5  # no token can be much likelier: the head of so small a model is bounded
    assert without < before - 0.5  # and forgotten
    assert abs(rehearsed - before) < abs(without - before) / 4
    before, *learned = scores(second)
    assert min(learned) > before + 0.5
