"""A policy as files that other tools read: its LoRA as PEFT keeps one, or merged into the base as a whole model.

In: an adapter that passed `validate_adapter`, whose very bytes are used, and its base. Out: files in a directory that
the caller made. A merged model is written by transformers (safetensors in shards, config), with the tokenizer's files,
chat template and generation config of the base beside it, byte for byte. It is proven before it is handed over: it
holds no tensor that the base has not, and where the trainer left a probe it computes the trainer's log-probabilities.

Nothing else of the project goes along: no manifest, no path of this machine.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from art_patch.errors import AdapterRejected, ConfigError, ModelNotFound
from art_patch.policies.base_model import BaseModel, read_base_model
from art_patch.policies.files import CONFIG, WEIGHTS, some
from art_patch.policies.model_files import BESIDE_WEIGHTS, Dtype
from art_patch.policies.probe import Probe, check_probe
from art_patch.policies.validation import ValidatedAdapter

Step = Callable[[int, int, str], None]
"""Told how many of how many steps are done, and what was done last."""

SHARD_SIZE = "5GB"
_STEPS = 4


@dataclass(frozen=True, slots=True)
class Merged:
    """A merged model.

    Attributes:
        dtype: of its weights.
        gap_nats: largest distance from the trainer's log-probabilities; `None` without a probe.
        left_out: tensors of the base's files that transformers does not load, and so does not write.
    """

    dtype: str
    gap_nats: float | None
    left_out: tuple[str, ...]


def write_adapter(adapter: ValidatedAdapter, directory: Path, *, base_name: str | None) -> None:
    """Write the LoRA in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`.

    Args:
        adapter: what was checked.
        directory: where to; exists.
        base_name: what its config calls the base, a directory or hub id; `None` leaves that open.
    """
    config = {**adapter.config, "base_model_name_or_path": base_name}
    (directory / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (directory / WEIGHTS).write_bytes(adapter.weights)


def write_merged(
    adapter: ValidatedAdapter, base: BaseModel, directory: Path, *, dtype: Dtype = "auto", step: Step
) -> Merged:
    """Write base and LoRA as one model.

    Args:
        adapter: what was checked against this base.
        base: its base.
        directory: where to; exists.
        dtype: of the weights; `auto` is the base's own. Sums are rounded to it once: bfloat16 loses what of a small
            update is below a half of its last digit.
        step: told how far it is.

    Raises:
        ConfigError: the base is quantised.
        ModelNotFound: the base cannot be loaded.
        AdapterRejected: the merged model is not what was trained.
    """
    from transformers import AutoTokenizer

    if "quantization_config" in json.loads((base.directory / "config.json").read_bytes()):
        raise ConfigError(f"{base.directory} is quantised, and a LoRA is not merged into that; export without --merged")
    model = _load(base.directory, dtype)
    step(1, _STEPS, "the base is loaded")
    model = _merged(model, adapter)
    step(2, _STEPS, f"{len(adapter.modules)} layers are merged")
    chosen = str(model.dtype).removeprefix("torch.")
    gap_nats = None if adapter.probe is None else _proven(adapter.name, adapter.probe, model, chosen)
    _save(model, base.directory, directory)
    step(3, _STEPS, "written")
    left_out = _left_out(adapter, base, directory)
    AutoTokenizer.from_pretrained(directory)  # type: ignore[no-untyped-call]
    step(4, _STEPS, "checked")
    return Merged(chosen, gap_nats, left_out)


def _load(directory: Path, dtype: Dtype) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # the command shows its own
    wanted: Any = "auto" if dtype == "auto" else getattr(torch, dtype)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=wanted, use_safetensors=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelNotFound(f"{directory} cannot be loaded: {error}") from error
    return model.eval().requires_grad_(False)


def _merged(model: Any, adapter: ValidatedAdapter) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load

    if model.config.tie_word_embeddings and "lm_head" in adapter.modules:
        raise AdapterRejected(
            f"{adapter.name} changes lm_head, which the base shares with its embedding; merged, both would change. "
            "Export without --merged."
        )
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.config["lora_alpha"],
        use_rslora=bool(adapter.config.get("use_rslora")),
        lora_dropout=0.0,
        target_modules=list(adapter.modules),
        task_type="CAUSAL_LM",
    )
    tensors = load(adapter.weights)
    with warnings.catch_warnings():
        # peft 0.21 asks transformers 5.23 by the old name
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        tuned = get_peft_model(model, config)
    for module in adapter.modules:
        layer = model.get_submodule(module)
        for side, weights in (("A", layer.lora_A), ("B", layer.lora_B)):
            tensor = tensors[f"base_model.model.{module}.lora_{side}.weight"].float()
            weights["default"].weight = torch.nn.Parameter(tensor, requires_grad=False)
    return cast("Any", tuned).merge_and_unload(progressbar=False, safe_merge=True)


def _proven(name: str, probe: Probe, model: Any, dtype: str) -> float:
    """How far the merged model is from the trainer, at most; too far is refused."""
    import torch

    with torch.inference_mode():
        logits_TV = model(torch.tensor([probe.token_ids])).logits[0, :-1].float()
    targets_T1 = torch.tensor(probe.targets).unsqueeze(1)
    computed = logits_TV.log_softmax(-1).gather(1, targets_T1).squeeze(1).tolist()
    return check_probe(name, probe, computed, None, dtype=dtype)


def _save(model: Any, base: Path, directory: Path) -> None:
    from transformers import GenerationConfig

    kept = [name for name in BESIDE_WEIGHTS if (base / name).is_file()]
    if "generation_config.json" in kept:
        # transformers refuses to save what some bases say there, which need not hinder a model; theirs is copied.
        model.generation_config = GenerationConfig()
    model.save_pretrained(directory, max_shard_size=SHARD_SIZE)
    for name in kept:
        shutil.copyfile(base / name, directory / name)


def _left_out(adapter: ValidatedAdapter, base: BaseModel, directory: Path) -> tuple[str, ...]:
    """What the base has and the merged model has not; what the base has not, or of another shape, is refused."""
    written, known = read_base_model(directory).weight_shapes, base.weight_shapes
    other = [name for name, shape in written.items() if known.get(name) != shape]
    other += [f"{module}.weight" for module in adapter.modules if f"{module}.weight" not in written]
    if other:
        raise AdapterRejected(
            f"{adapter.name}: merged, the model has other tensors than its base ({some(sorted(other))}), so other "
            "tools may not read it. Export without --merged, and serve base and adapter."
        )
    return tuple(sorted(known.keys() - written.keys()))
