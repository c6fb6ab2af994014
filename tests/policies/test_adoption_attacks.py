"""LoRAs that an attacker or a broken trainer wrote: each is refused in words, at once, with little memory."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from art_patch.errors import AdapterRejected
from art_patch.policies import CONFIG, WEIGHTS, adoption, read_base_model, read_lora
from art_patch.policies.base_models import BaseModel
from tests.benchmarks.families_start import make_lora
from tests.support.tiny import make_tiny_model

PATTERN = {"alpha_pattern": {"q_proj": 3}}
RANKS = {"rank_pattern": {"q_proj": 4}}
FOREVER = "([a-z_.0-9]+)+x"
DEEP = b"[" * 200_000


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return read_base_model(make_tiny_model(tmp_path_factory.mktemp("models") / "base", hidden=32, vocab_size=320))


@pytest.fixture
def lora(base: BaseModel, tmp_path: Path) -> Path:
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    return make_lora(tmp_path / "lora", base.directory, settings)


def refused(lora: Path, base: BaseModel, words: str) -> None:
    with pytest.raises(AdapterRejected) as raised:
        read_lora(lora, base)
    assert words in str(raised.value)
    assert len(str(raised.value)) < 1_000


CONFIGS: Mapping[str, tuple[dict[str, Any], str]] = {
    "alpha 0": ({"lora_alpha": 0}, "lora_alpha = 0 is not a positive number"),
    "alpha 0 of all but one": ({"lora_alpha": 0} | PATTERN, "lora_alpha = 0 is not a positive number"),
    "alpha nan": ({"lora_alpha": float("nan")} | PATTERN, "lora_alpha = nan"),
    "alpha huge": ({"lora_alpha": 10**400} | PATTERN, "lora_alpha = 1000"),
    "alpha a list": ({"lora_alpha": [1]} | PATTERN, "lora_alpha = [1]"),
    "no alpha": ({"lora_alpha": None} | PATTERN, "lora_alpha = None"),
    "rank 0": ({"r": 0} | PATTERN, "r = 0; this engine serves ranks"),
    "rank a text": ({"r": "4"} | PATTERN, "r = '4'"),
    "rank below 0": ({"r": -4, "use_rslora": True} | PATTERN, "r = -4"),
    "no rank": ({"r": None} | PATTERN, "r = None"),
    "rank is not that of the weights": ({"r": 8}, "has shape (4, 32), but adapter_config.json says r = 8"),
    "rank 4096": ({"r": 4096}, "says r = 4096"),
    "pattern a list": ({"rank_pattern": [1]}, "rank_pattern must be a number by name"),
    "pattern a text": ({"alpha_pattern": "x"}, "alpha_pattern must be a number by name"),
    "pattern of a text": ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern of q_proj is 'x'"),
    "pattern of nothing": ({"alpha_pattern": {"q_proj": None}}, "is None, no positive number"),
    "pattern 0": ({"alpha_pattern": {"q_proj": 0}}, "is 0, no positive number"),
    "pattern nan": ({"alpha_pattern": {"q_proj": float("nan")}}, "is nan, no positive number"),
    "pattern huge": ({"alpha_pattern": {"q_proj": 10**400}}, "no positive number"),
    "pattern is none": ({"alpha_pattern": {"(": 3}}, "has '(', no pattern (missing )"),
    "pattern takes forever": ({"alpha_pattern": {FOREVER: 3}}, "which may take forever"),
    "patterns without end": ({"alpha_pattern": {f"q{n}": 3 for n in range(5_000)}}, "4,096 at most"),
    "another rank by pattern": ({"rank_pattern": {"q_proj": 8}}, "has the rank 4, and adapter_config.json says 8"),
    "targets a number": ({"target_modules": 3}, "target_modules = 3"),
    "other targets": ({"target_modules": ["k_proj"]}, "holds model.layers.0.self_attn.q_proj"),
    "a bias": ({"lora_bias": True}, "lora_bias = True is not served"),
    "whole layers": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    "layers twice": ({"layer_replication": [[0, 2]]}, "layer_replication"),
    "weights of its own": ({"init_lora_weights": "pissa"}, "init_lora_weights"),
}


@pytest.mark.parametrize("attack", CONFIGS)
def test_a_hostile_config(lora: Path, base: BaseModel, attack: str):
    changes, words = CONFIGS[attack]
    (lora / CONFIG).write_text(json.dumps(json.loads((lora / CONFIG).read_text()) | changes))
    refused(lora, base, words)


def header(fields: Any) -> bytes:
    content = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return struct.pack("<Q", len(content)) + content


BYTES: Mapping[str, bytes] = {
    "empty": b"",
    "a header without end": struct.pack("<Q", 1 << 62),
    "the largest header": struct.pack("<Q", (1 << 64) - 1),
    "a header that is deep": header(DEEP),
    "a header that is a list": header([]),
    "offsets beyond the file": header({"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 60]}}),
    "a shape below 0": header({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}) + b"0000",
}


@pytest.mark.parametrize("attack", BYTES)
def test_a_hostile_file(lora: Path, base: BaseModel, attack: str):
    (lora / WEIGHTS).write_bytes(BYTES[attack])
    refused(lora, base, "is not a whole safetensors file")


Change = Callable[[dict[str, Tensor], str, str], dict[str, Tensor]]

TENSORS: Mapping[str, tuple[dict[str, Any], Change, str]] = {
    "a number": ({}, lambda t, a, b: t | {a: torch.tensor(1.0)}, "has shape ()"),
    "a number and a pattern": (RANKS, lambda t, a, b: t | {a: torch.tensor(1.0)}, "has shape ()"),
    "a row and a pattern": (RANKS, lambda t, a, b: t | {a: torch.zeros(4)}, "has shape (4,)"),
    "a cube and a pattern": (RANKS, lambda t, a, b: t | {a: torch.zeros(4, 32, 2)}, "has shape (4, 32, 2)"),
    "rank 0 and a pattern": (
        RANKS, lambda t, a, b: t | {a: torch.zeros(0, 32), b: torch.zeros(128, 0)}, "has the rank 0",
    ),
    "whole numbers and a pattern": (RANKS, lambda t, a, b: {k: v.to(torch.int8) for k, v in t.items()}, "dtype I8"),
    "B alone and a pattern": (RANKS, lambda t, a, b: {k: v for k, v in t.items() if k != a}, "only one of lora_A and"),
    "A alone and a pattern": (RANKS, lambda t, a, b: {k: v for k, v in t.items() if k != b}, "only one of lora_A and"),
    "another rank of B": (RANKS, lambda t, a, b: t | {b: torch.zeros(128, 5)}, "has shape (128, 5)"),
    "an embedding": ({}, lambda t, a, b: t | {"base_model.model.x.lora_embedding_A": t[a] * 1}, "is no LoRA weight"),
    "DoRA's": ({}, lambda t, a, b: t | {a.replace("A.weight", "magnitude_vector"): t[a] * 1}, "is no LoRA weight"),
    "a router": (
        {"target_modules": ["q_proj", "v_proj", "gate"]},
        lambda t, a, b: t | {a.replace("self_attn.q_proj", "mlp.gate"): t[a] * 1}, "does not have",
    ),
    "a layer that is not there": ({}, lambda t, a, b: t | {a.replace(".0.", ".99."): t[a] * 1}, "does not have"),
    "infinite": (RANKS, lambda t, a, b: t | {b: t[b] / 0}, "NaN or infinity"),
    "large": ({}, lambda t, a, b: {k: v * 1e20 for k, v in t.items()}, "more than 1000"),
    "none": ({}, lambda t, a, b: {}, "target_modules = []"),
}  # fmt: skip


@pytest.mark.parametrize("attack", TENSORS)
def test_hostile_weights(lora: Path, base: BaseModel, attack: str):
    changes, change, words = TENSORS[attack]
    tensors = load_file(lora / WEIGHTS)
    a = next(key for key in sorted(tensors) if "0.self_attn.q_proj.lora_A" in key)
    save_file(change(tensors, a, a.replace("lora_A", "lora_B")), lora / WEIGHTS)
    (lora / CONFIG).write_text(json.dumps(json.loads((lora / CONFIG).read_text()) | changes))
    refused(lora, base, words)


def test_one_large_rank_does_not_fill_the_memory(lora: Path, base: BaseModel, monkeypatch: pytest.MonkeyPatch):
    """Engines serve one rank a LoRA, so all layers get the largest."""
    monkeypatch.setattr(adoption, "_MOST_FILLED", 1)
    tensors = load_file(lora / WEIGHTS)
    a = next(key for key in sorted(tensors) if "0.self_attn.q_proj.lora_A" in key)
    tensors |= {a: torch.zeros(50_000, 32), a.replace("lora_A", "lora_B"): torch.zeros(128, 50_000)}
    save_file(tensors, lora / WEIGHTS)
    ranks = {"rank_pattern": {"layers.0.self_attn.q_proj": 50_000}}
    (lora / CONFIG).write_text(json.dumps(json.loads((lora / CONFIG).read_text()) | ranks))
    refused(lora, base, "it would have 97 MiB in place of 30")


@pytest.mark.parametrize("file", [CONFIG, WEIGHTS])
def test_what_is_no_plain_file(lora: Path, base: BaseModel, file: str):
    (lora / file).unlink()
    (lora / file).mkdir()
    refused(lora, base, f"{file} is not a plain file")
    (lora / file).rmdir()
    os.mkfifo(lora / file)
    refused(lora, base, f"{file} is not a plain file")
    (lora / file).unlink()
    (lora / file).symlink_to("/dev/zero")
    refused(lora, base, f"{file} cannot be read")


def test_what_else_a_config_says_is_neither_followed_nor_kept(lora: Path, base: BaseModel):
    odd = {
        "task_type": "os.system", "lora_dropout": "x", "inference_mode": [1], "exclude_modules": FOREVER,
        "target_modules": FOREVER, "revision": "../x", "auto_mapping": {"parent_library": "os"}, "use_rslora": "no",
    }  # fmt: skip
    (lora / CONFIG).write_text(json.dumps(json.loads((lora / CONFIG).read_text()) | odd))
    found = read_lora(lora, base)
    assert found.probe is not None
    layers = [f"model.layers.{n}.self_attn.{name}_proj" for n in (0, 1) for name in ("q", "v")]
    assert found.config == {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": layers,
        "use_rslora": True, "bias": "none", "lora_dropout": 0.0, "inference_mode": True,
    }  # fmt: skip
