"""Which bases can be trained so that the engine takes their LoRA, told from config and checkpoint alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from art_patch.errors import ConfigError, ModelNotFound
from art_patch.training import require_servable
from tests.support.families import CONFIGS, REFUSED, SEEING, make_model, make_model_that_sees


@pytest.mark.parametrize("kind", REFUSED)
def test_a_base_whose_every_lora_would_be_refused_is_told_with_the_modules(tmp_path: Path, kind: str):
    make, words = REFUSED[kind]
    make().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"{re.escape(str(tmp_path))} cannot be trained: .*{words}.*; serve another"):
        require_servable(str(tmp_path))


@pytest.mark.parametrize("model_type", [*CONFIGS, *SEEING])
def test_every_family_that_is_served_passes_and_nothing_random_is_drawn(tmp_path: Path, model_type: str):
    make = make_model_that_sees if model_type in SEEING else make_model
    make(model_type).save_pretrained(tmp_path)
    before = torch.get_rng_state()
    require_servable(str(tmp_path))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_base_that_is_not_there_is_told(tmp_path: Path):
    with pytest.raises(ModelNotFound, match="there is no directory"):
        require_servable(str(tmp_path / "gone"))
