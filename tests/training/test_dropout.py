"""Dropout is peft's, drawn from seed and step, and off wherever a log-probability is compared with another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from art_patch.training import TrainGroup
from art_patch.training.loop.loading import as_reference, dropout_on, load_policy
from art_patch.training.loop.update import update
from art_patch.training.scoring import Scorer
from tests.support.train_jobs import SMALL, make_job, random_groups, weights_of

HALF = replace(SMALL, lora_dropout=0.5)
IDS = (5, 6, 7, 20, 21, 22)


@pytest.fixture(scope="module")
def groups(base: Path) -> tuple[TrainGroup, ...]:
    return random_groups(base, groups=4, siblings=3)


def with_a_lora(base: Path) -> Any:
    model = load_policy(str(base), None, HALF).double()
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.05)
    return model


def dropouts(model: Any) -> list[nn.Dropout]:
    return [module for module in model.modules() if isinstance(module, nn.Dropout)]


def test_it_is_pefts_in_a_step_and_nowhere_else(base: Path):
    model = with_a_lora(base)
    scorer = Scorer(model, share=False)
    exact = scorer.next_TV(IDS)
    with dropout_on(model, HALF, 3, 0):
        drawn = torch.get_rng_state()
        dropped = scorer.next_TV(IDS)
        assert not torch.equal(scorer.next_TV(IDS), dropped)
    assert torch.equal(scorer.next_TV(IDS), exact)
    for module in dropouts(model):
        module.train()
    for layer in (module for module in model.modules() if "forward" in vars(module)):
        vars(layer).pop("forward")  # peft's own
    torch.set_rng_state(drawn)
    with torch.no_grad():
        plain = torch.log_softmax(model(input_ids=torch.tensor([IDS])).logits[0], dim=-1)
    torch.testing.assert_close(dropped, plain, atol=1e-9, rtol=0)
    assert (dropped - exact).abs().max() > 1e-3


def test_without_it_nothing_is_drawn(base: Path):
    model = load_policy(str(base), None, SMALL)
    before = torch.get_rng_state()
    with dropout_on(model, SMALL, 0, 0):
        assert torch.equal(torch.get_rng_state(), before)


def test_an_update_with_dropout_is_the_seeds_and_starts_from_exact_scores(
    base: Path, groups: tuple[TrainGroup, ...], tmp_path: Path
):
    adapters = tmp_path / "adapters"
    found: list[dict[str, torch.Tensor]] = []
    for step, changes in enumerate(({}, {"gradient_checkpointing": True}, {"seed": 0, "lora_dropout": 0.0}), start=1):
        job = make_job(
            base, adapters / f"agent@{step}", groups, **{"epochs": 2, "minibatches": 2, "lora_dropout": 0.3} | changes
        )
        metrics = update(job, tmp_path / f"{step}")
        assert metrics.logprob_gap_nats is not None
        assert metrics.logprob_gap_nats < 1e-4
        settings = json.loads((adapters / f"agent@{step}" / "adapter_config.json").read_text())
        assert settings["lora_dropout"] == job.config.lora_dropout
        found.append(weights_of(adapters / f"agent@{step}"))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert not all(torch.equal(found[0][name], found[2][name]) for name in found[0])


def test_a_lora_that_is_continued_takes_the_configs(base: Path, groups: tuple[TrainGroup, ...], tmp_path: Path):
    parent = tmp_path / "adapters" / "agent@1"
    update(make_job(base, parent, groups, lora_dropout=0.5), tmp_path / "1")
    for dropout in (0.0, 0.1):
        model = load_policy(str(base), parent, replace(SMALL, lora_dropout=dropout))
        assert {module.p for module in dropouts(model)} == ({dropout} if dropout else set())
        assert not any(module.training for module in dropouts(model))
        with as_reference(model, parent):
            assert not any(module.training for module in dropouts(model))
