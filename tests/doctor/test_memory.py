"""What fits on a card: counts from a config alone against real models, and what the command says of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from art_patch.doctor import forecast, memory, read_shape
from art_patch.doctor.base_shape import shape_of
from art_patch.doctor.memory import GIB, Update, serving_bytes, step_bytes
from art_patch.errors import ConfigError, ModelNotFound
from tests.support.real_bases import BASES, config_of

QWEN_3_8B: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
    "max_position_embeddings": 40_960, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize("name", BASES)
def test_weights_and_lora_are_those_of_the_real_model(name: str, tmp_path: Path):
    """Parts that see are counted only nearly: they have no place in this comparison."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    from art_patch.training.families import target_names

    config = config_of(name)
    auto = transformers.AutoModelForCausalLM if BASES[name].vision is None else transformers.AutoModelForImageTextToText
    with torch.device("meta"):
        model: Any = auto.from_config(config)
    senses = sum(p.numel() for n, p in model.named_parameters() if "language_model" not in n and "lm_head" not in n)
    whole = sum(p.numel() for p in model.parameters())
    text = whole - (senses if BASES[name].vision is not None else 0)
    fields = config.to_dict()
    fields.pop("vision_config", None)
    fields.pop("audio_config", None)
    shape = shape_of(fields)
    assert shape.weights == pytest.approx(text, rel=0.02)
    lora = LoraConfig(r=4, target_modules=target_names(model), task_type="CAUSAL_LM")
    assert shape.lora(4) == pytest.approx(get_peft_model(model, lora).get_nb_trainable_parameters()[0], rel=0.001)


def test_a_known_base():
    shape = shape_of(QWEN_3_8B)
    assert (shape.weights, shape.lora(8), shape.context) == (8_190_735_360, 21_823_488, 40_960)
    assert sum(layer.cached for layer in shape.layers) * 2 == 147_456  # bytes a token, as vLLM tells for Qwen3-8B


def test_options_are_named_until_it_fits():
    small, large = (forecast(shape_of(QWEN_3_8B), gib) for gib in (24, 80))
    assert (small.serve.fits, small.train.fits, small.both.fits) == (True, True, False)
    assert small.serve.options == {"serve": "--max-model-len 16384"}
    assert "--micro-batch-tokens" in small.train.options["retrain"]
    assert (large.serve.options, large.train.options, large.both.fits) == ({}, {}, True)
    assert "--gpu-memory-utilization" in large.both.options["serve"]
    tiny = forecast(shape_of(QWEN_3_8B), 4)
    assert (tiny.serve.fits, tiny.train.fits, tiny.train.options) == (False, False, {})


@pytest.mark.parametrize("gib", [8, 12, 16, 24, 48])
def test_what_is_said_to_fit_fits_by_the_formulas(gib: float):
    shape = shape_of(QWEN_3_8B)
    found = forecast(shape, gib)
    assert all(fit.needs_gib <= gib for fit in (found.serve, found.train, found.both) if fit.fits)
    assert all(fit.needs_gib > gib * 0.9 for fit in (found.serve, found.train, found.both) if not fit.fits)


def test_every_option_needs_less():
    shape = shape_of(QWEN_3_8B)
    tokens: dict[str, Any] = {"tokens": 8192, "predicted": 8192}
    whole = step_bytes(shape, Update(**tokens))
    changes: list[dict[str, Any]] = [
        {"bits": 8}, {"bits": 4}, {"tokens": 4096, "predicted": 4096}, {"rank": 4}, {"float_bytes": 4},
        {"recompute": False},
    ]  # fmt: skip
    less = [step_bytes(shape, Update(**tokens | change)) < whole for change in changes]
    assert less == [True, True, True, True, False, False]
    assert serving_bytes(shape, 8192) - serving_bytes(shape, 4096) == 147_456 * 4096
    assert whole > 16 * GIB


def test_what_is_repeated_here_is_that_of_the_trainer():
    from art_patch.training import scoring

    assert memory.CHUNK_LOGITS == scoring.CHUNK_LOGITS


@pytest.mark.slow
def test_the_peak_of_an_update_is_near_the_forecast():
    """One of the twelve shapes of the benchmark. Without memory that is given back, the peak is a third above it."""
    line = [sys.executable, "tests/benchmarks/families_memory.py", "--json", "--cases", "qwen3 bf16"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["forecast_error"] <= 0.25


def test_a_base_is_a_directory_its_config_or_an_error(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_3_8B))
    assert read_shape(str(tmp_path)) == read_shape(str(tmp_path / "config.json")) == shape_of(QWEN_3_8B)
    with pytest.raises(ModelNotFound, match="give a directory with its config"):
        read_shape(str(tmp_path / "none"))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelNotFound, match="missing or broken"):
        read_shape(str(tmp_path))
    with pytest.raises(ConfigError, match="does not say 'hidden_size'"):
        shape_of({"model_type": "qwen3", "num_hidden_layers": 2})


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "art_patch", "doctor", *arguments], capture_output=True, text=True, timeout=120
    )


def test_the_command_needs_no_torch(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_3_8B))
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\nfrom art_patch.cli import main; main()"
    )
    line = [sys.executable, "-c", code, "doctor", "--base", str(tmp_path), "--gpu-memory", "24", "--json"]
    shown = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert (shown.returncode, shown.stderr) == (0, "")
    facts = json.loads(shown.stdout)
    assert (facts["weights"], facts["serve"]["fits"], facts["both"]["fits"]) == (8_190_735_360, True, False)
    assert "not been compared with a real card" in facts["untried"]


def test_the_command_as_a_person_reads_it(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_3_8B))
    shown = doctor("--base", str(tmp_path), "--gpu-memory", "24")
    assert shown.returncode == 0
    for words in ("8.19 billion weights", "--max-model-len 16384", "does not fit", "not been compared"):
        assert words in shown.stdout
    assert doctor("--base", str(tmp_path), "--gpu-memory", "4").returncode == 1
    alone = doctor("--base", str(tmp_path))
    assert (alone.returncode, "needs both" in alone.stderr) == (2, True)
    assert doctor("--base", str(tmp_path / "none"), "--gpu-memory", "24").returncode == 9
