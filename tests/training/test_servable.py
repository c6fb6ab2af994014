"""Which bases can be trained so that the engine takes their LoRA, told from config and checkpoint alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from art_patch.errors import ConfigError, ModelNotFound
from art_patch.training import require_servable
from tests.training.test_families import CONFIGS, SIZE, make_gemma_that_sees, make_model


def make_qwen_that_sees(kind: str, **text: Any) -> Any:
    """A tiny model that also sees, as its makers publish it."""
    import transformers

    sees = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32, "depth": 1}
    vision = {**sees, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    config = transformers.AutoConfig.for_model(kind, text_config={**SIZE, "head_dim": 8, **text}, vision_config=vision)
    return transformers.AutoModelForImageTextToText.from_config(config)


REFUSED = {
    "gemma3": (make_gemma_that_sees, r"no model\.language_model\.layers\.0\.mlp\.down_proj, .* and 11 more"),
    "qwen3_5": (
        lambda: make_qwen_that_sees(
            "qwen3_5", linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8
        ),
        r"no model\.layers\.0\.linear_attn\.in_proj_a, .* and \d+ more",
    ),
    "qwen3_vl": (lambda: make_qwen_that_sees("qwen3_vl"), "Qwen3VLConfig.* for this kind of AutoModel"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_base_whose_every_lora_would_be_refused_is_told_with_the_modules(tmp_path: Path, kind: str):
    make, words = REFUSED[kind]
    make().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"{re.escape(str(tmp_path))} cannot be trained: .*{words}.*; serve another"):
        require_servable(str(tmp_path))


@pytest.mark.parametrize("model_type", CONFIGS)
def test_every_family_that_is_served_passes_and_nothing_random_is_drawn(tmp_path: Path, model_type: str):
    make_model(model_type).save_pretrained(tmp_path)
    before = torch.get_rng_state()
    require_servable(str(tmp_path))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_base_that_is_not_there_is_told(tmp_path: Path):
    with pytest.raises(ModelNotFound, match="there is no directory"):
        require_servable(str(tmp_path / "gone"))
