"""Distillation: rows that a teacher scored are learned by the gradient of the reverse KL, token by token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from art_patch.training import Example, LossName, Row, Sibling, TrainGroup, read_job, run_job
from art_patch.training.loop.gradients import StartScores, gradients_of, start_scores
from art_patch.training.loop.job import claim
from art_patch.training.loop.metrics import without_far_rows
from art_patch.training.loop.processes import ALONE
from art_patch.training.scoring import Scorer
from tests.support.families import logits_of
from tests.support.tiny import make_tiny_model
from tests.support.train_jobs import SMALL, as_sampled, make_job, plain_logprobs, plain_model, random_groups, trainable


def taught(row: Row, logprobs: list[float]) -> Row:
    """The row with a teacher's log-probability of each sampled token."""
    known = iter(logprobs)
    return replace(row, teacher_T=tuple(next(known) if sampled else 0.0 for sampled in row.sampled_T))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("teacher")
    return plain_model(make_tiny_model(path, seed=7, hidden=32, vocab_size=320))


@pytest.fixture(scope="module")
def groups(base: Path, teacher) -> tuple[TrainGroup, ...]:
    """Runs without siblings, each a group of its own, and one group of two, whose rewards say nothing."""

    def scored(sibling: Sibling) -> Sibling:
        rows = tuple(
            taught(row, plain_logprobs(teacher, replace(row, temperature_T=(1.0,) * len(row.ids_T))))
            for row in sibling.example.rows
        )
        return replace(sibling, example=Example(rows, -0.5))

    found = random_groups(base, groups=3, siblings=2)
    runs = [TrainGroup(one.trajectory_id, (scored(one),)) for group in found[:2] for one in group.siblings]
    return (*runs, replace(found[2], siblings=tuple(map(scored, found[2].siblings))))


@pytest.mark.parametrize("loss", ["dapo", "cispo", "sapo"])
def test_the_gradient_is_that_of_the_reverse_kl(
    base: Path, groups: tuple[TrainGroup, ...], tmp_path: Path, loss: LossName
):
    """By hand: the mean over all sampled tokens of (log policy - log teacher) times the gradient of log policy."""
    model = trainable(base)
    rows = [row for group in groups for each in group.siblings for row in each.example.rows]
    sampled = [as_sampled(model, row) for row in rows]  # on-policy: what the policy at the start gives
    known = dict(zip(rows, sampled, strict=True))
    here = tuple(
        replace(
            group,
            siblings=tuple(
                replace(each, example=replace(each.example, rows=tuple(known[row] for row in each.example.rows)))
                for each in group.siblings
            ),
        )
        for group in groups
    )
    job = make_job(base, tmp_path / "agent@1", here, loss=replace(SMALL.loss, name=loss, importance_cap=None))
    if loss == "sapo":  # a mean over trajectories
        job = replace(job, groups=here[:1])
    model.zero_grad(set_to_none=True)
    terms, kl = [], []
    for row in (row for group in job.groups for each in group.siblings for row in each.example.rows):
        logits_TV = logits_of(model, torch.tensor([row.ids_T]))[0]
        for t in range(1, len(row.ids_T)):
            if row.sampled_T[t]:
                logprob = torch.log_softmax(logits_TV[t - 1] / row.temperature_T[t], -1)[row.ids_T[t]]
                away = logprob.detach() - row.teacher_T[t]
                terms.append(away * logprob)
                kl.append(away)
    torch.stack(terms).mean().backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}

    scorer = Scorer(model)
    start = start_scores(job, model, scorer, tmp_path, ALONE)
    items = list(range(len(job.lessons)))
    model.zero_grad(set_to_none=True)
    sums = gradients_of(job, scorer, start, ALONE)["groups"](items)
    ours = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    assert ours.keys() == expected.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-5)
    # k3 has the same mean; here it is measured on the same tokens.
    k3 = [(torch.expm1(-one) + one).item() for one in kl]
    assert sums["reference_kl_nats"] == pytest.approx(sum(k3), rel=1e-4)
    assert sums["tokens"] == len(kl)


def test_a_teacher_for_whom_a_token_is_impossible_gives_a_finite_gradient(
    base: Path, groups: tuple[TrainGroup, ...], tmp_path: Path
):
    (first, *_) = groups
    (sibling,) = first.siblings
    row = taught(sibling.example.rows[0], [-9999.0] * sibling.example.sampled)  # what vLLM writes for minus infinity
    job = make_job(
        base, tmp_path / "a" / "agent@1", [replace(first, siblings=(replace(sibling, example=Example((row,), -1.0)),))]
    )
    metrics = run_job(job, tmp_path / "work")
    assert metrics.steps == 1 and metrics.loss == pytest.approx(20.0, abs=15.0)


def test_an_update_comes_nearer_to_the_teacher_and_says_how_near(
    base: Path, groups: tuple[TrainGroup, ...], tmp_path: Path
):
    job = make_job(base, tmp_path / "adapters" / "agent@1", groups, epochs=6, learning_rate=1e-2)
    metrics = run_job(job, tmp_path / "work")
    nats = [step["reference_kl_nats"] for step in metrics.history]
    assert metrics.trajectories == 6 and nats[-1] < nats[0]


def test_the_file_of_a_job_keeps_what_the_teacher_said(base: Path, groups: tuple[TrainGroup, ...], tmp_path: Path):
    plain = random_groups(base, groups=1, siblings=2, seed=5)
    for mine in (groups, plain, (*groups, *plain)):
        job = make_job(base, tmp_path / "agent@1", mine)
        claim(directory := tmp_path / str(len(mine)), job)
        assert read_job(directory) == job


def test_a_row_that_is_too_far_takes_nothing_from_what_others_are_taught(
    base: Path, groups: tuple[TrainGroup, ...], tmp_path: Path
):
    job = make_job(base, tmp_path / "agent@1", groups, max_drift_nats=0.5)
    recorded = [
        torch.tensor([value for value, own in zip(row.logprobs_T, row.sampled_T, strict=True) if own])
        for group in groups
        for each in group.siblings
        for row in each.example.rows
    ]
    start = StartScores((*recorded[:-1], recorded[-1] - 5), (), None, None)
    near, _, far = without_far_rows(job, start)
    assert far == 1 and near.groups[:-1] == groups[:-1]
    kept, gone = near.groups[-1].siblings
    assert kept == groups[-1].siblings[0] and not gone.example.rows
    assert near.groups[-1].teaches
