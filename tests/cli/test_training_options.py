"""`retrain` has an option for each setting of an update, and bounds of it may be `none`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import typer

from art_patch.cli.commands.retrain import retrain
from art_patch.cli.typed_options import marked_fields
from art_patch.training import LossConfig, TrainConfig

OWN = {"loss", "imitate_models", "advantage_scale"}
"""Parameters of `retrain` itself: another record, a setting of the project, and one whose default the loss decides."""


def parsed(*words: str) -> dict[str, Any]:
    parser = typer.Typer(add_completion=False)
    parser.command()(retrain)
    with typer.main.get_command(parser).make_context("art-patch retrain", list(words)) as context:
        return context.params


def test_every_setting_is_an_option_with_its_default():
    for record in (TrainConfig, LossConfig):
        marked = {name: default for name, _, _, default in marked_fields(record)}
        assert {each.name for each in fields(record)} - OWN == marked.keys()
        shown = parsed()
        assert {name: shown[name] for name in marked} == marked
    assert {"imitate_models", "advantage_scale"} <= parsed().keys()


def test_a_bound_is_a_number_or_none():
    found = parsed("--max-kl-nats", "none", "--max-gap-nats", "0.25", "--importance-cap", "NONE", "--epochs", "3")
    assert (found["max_kl_nats"], found["max_gap_nats"], found["importance_cap"]) == (None, 0.25, None)
    assert (found["max_drift_nats"], found["epochs"]) == (0.5, 3)
    with pytest.raises(Exception, match="'far' is neither a number nor `none`"):
        parsed("--max-kl-nats", "far")
