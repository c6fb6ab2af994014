"""Adapters that must be refused: what spoils one before or after its publication, and the words of the refusal."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def edit_tensors(work: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tensors = load_file(work / "adapter_model.safetensors")
    change(tensors)
    save_file({key: value.clone() for key, value in tensors.items()}, work / "adapter_model.safetensors")


def fill(value: float, dtype: torch.dtype = torch.float32) -> Callable[[Path], None]:
    def spoil(work: Path) -> None:
        def change(tensors: dict[str, Any]) -> None:
            tensors[Q] = tensors[Q].to(dtype)
            tensors[Q][1, 2] = value

        edit_tensors(work, change)

    return spoil


def multiply(factor: float) -> Callable[[Path], None]:
    def change(tensors: dict[str, Any]) -> None:
        for tensor in tensors.values():
            tensor *= factor

    return lambda work: edit_tensors(work, change)


def rename_all(old: str, new: str) -> Callable[[Path], None]:
    def change(tensors: dict[str, Any]) -> None:
        for key in list(tensors):
            tensors[key.replace(old, new)] = tensors.pop(key)

    return lambda work: edit_tensors(work, change)


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda work: edit_json(work / "adapter_config.json", **changes)


def weights(content: bytes) -> Callable[[Path], object]:
    return lambda work: (work / "adapter_model.safetensors").write_bytes(content)


def truncate(work: Path) -> None:
    path = work / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def extra_layers(tensors: dict[str, Any]) -> None:
    for key in [key for key in tensors if ".layers.1." in key]:
        tensors[key.replace(".layers.1.", ".layers.7.")] = tensors[key]


def without_q(tensors: dict[str, Any]) -> None:
    del tensors[Q], tensors[Q.replace("lora_A", "lora_B")]


def wider(tensors: dict[str, Any]) -> None:
    tensors[Q] = torch.zeros(4, 256)


BEFORE_PUBLISHING: dict[str, tuple[Callable[[Path], object], str]] = {
    "rank above max": (config(r=65), "r = 65; this engine serves ranks 1 to"),
    "rank is no number": (config(r=True), "r = True"),
    "DoRA": (config(use_dora=True), "use_dora = True is not served"),
    "bias": (config(bias="all"), "bias = 'all'"),
    "modules_to_save": (config(modules_to_save=["lm_head"]), "modules_to_save"),
    "rank_pattern": (config(rank_pattern={"q_proj": 2}), "rank_pattern"),
    "pissa": (config(init_lora_weights="pissa"), "init_lora_weights"),
    "not LoRA": (config(peft_type="IA3"), "peft_type is 'IA3'"),
    "alpha": (config(lora_alpha=-1), "lora_alpha = -1"),
    "config is not JSON": (lambda work: (work / "adapter_config.json").write_text("{r: 4"), "is not JSON"),
    "config is a list": (lambda work: (work / "adapter_config.json").write_text("[]"), "is not a JSON object"),
    "wrong base width": (lambda work: edit_tensors(work, wider), "has shape (4, 256); the base weight"),
    "truncated": (truncate, "is not a whole safetensors file"),
    "random bytes": (weights(os.urandom(2000)), "is not a whole safetensors file"),
    "empty file": (weights(b""), "is not a whole safetensors file"),
    "no tensors": (lambda work: save_file({}, work / "adapter_model.safetensors"), "lacks model.layers.0"),
    "extra layers": (lambda work: edit_tensors(work, extra_layers), "layers.7.mlp.down_proj, which the base model"),
    "config r is not tensor rank": (config(r=8), "says r = 8: the scaling would be wrong"),
    "wrong prefix": (rename_all("base_model.model.", ""), "is no LoRA weight of this base"),
    "wrong inner prefix": (rename_all("model.layers", "layers"), "which the base model"),
    "missing module": (lambda work: edit_tensors(work, without_q), "lacks model.layers.0.self_attn.q_proj"),
    "missing half": (lambda work: edit_tensors(work, lambda t: t.pop(Q)), "only one of lora_A and lora_B"),
    "unnamed module": (config(target_modules=["q_proj"]), "which target_modules does not name"),
    "no targets": (config(target_modules=None), "target_modules = None"),
    "NaN": (fill(float("nan")), "q_proj.lora_A.weight holds NaN or infinity"),
    "infinity": (fill(float("-inf")), "holds NaN or infinity"),
    "NaN in bfloat16": (fill(float("nan"), torch.bfloat16), "holds NaN or infinity"),
    "NaN in float16": (fill(float("inf"), torch.float16), "holds NaN or infinity"),
    "integers": (fill(1, torch.int32), "has dtype I32"),
    "exploded": (multiply(1e5), "it may change a weight of model.layers"),
    "overflowing": (fill(1e30), "more than 1000"),
}  # fmt: skip


def link(name: str) -> Callable[[Path], None]:
    def spoil(final: Path) -> None:
        target = final.parent / "elsewhere"
        shutil.move(final / name, target)
        (final / name).symlink_to(target)

    return spoil


def link_directory(final: Path) -> None:
    final.rename(final.parent / "real")
    final.symlink_to(final.parent / "real")


AFTER_PUBLISHING: dict[str, tuple[Callable[[Path], object], str]] = {
    "pickle": (lambda final: (final / "adapter_model.bin").write_bytes(b"x"), "may run code when read"),
    "unknown file": (lambda final: (final / "run.py").write_text(""), "run.py does not belong"),
    "sub-directory": (lambda final: (final / "sub").mkdir(), "sub is not a plain file"),
    "fifo": (lambda final: os.mkfifo(final / "README.md"), "README.md is not a plain file"),
    "file link": (link("adapter_model.safetensors"), "adapter_model.safetensors is a symbolic link"),
    "manifest link": (link("MANIFEST.json"), "MANIFEST.json cannot be read"),
    "directory link": (link_directory, "is a symbolic link"),
    "no manifest": (lambda final: (final / "MANIFEST.json").unlink(), "MANIFEST.json cannot be read"),
    "no config": (lambda final: (final / "adapter_config.json").unlink(), "adapter_config.json is missing"),
    "no weights": (lambda final: (final / "adapter_model.safetensors").unlink(), "safetensors is missing"),
    "config changed": (lambda final: edit_json(final / "adapter_config.json", r=8), "sha256 differs"),
    "weights changed": (truncate, "sha256 differs"),
    "file not in manifest": (lambda final: (final / "README.md").write_text("hi"), "does not match the directory"),
    "manifest lists nothing": (lambda final: edit_json(final / "MANIFEST.json", files=None), "lists no files"),
    "other base": (lambda final: edit_json(final / "MANIFEST.json", base_sha256="0" * 64), "for another base model"),
    "no directory": (shutil.rmtree, "no directory"),
}


def edit_json(path: Path, **changes: Any) -> None:
    """Changes entries of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
