"""The LoRAs loaded into one model, of which at most one is active: two implementations of one interface.

`_PeftBank` works with every number type and model size; `_MergedBank` is faster for small float32 models.

The scheduler's thread owns the bank and calls it only between two forward passes. Adapters are validated before they
reach the bank: every module that they name exists and every shape fits.
"""

import warnings
from typing import Any, Protocol

import torch

from art_patch.policies import ValidatedAdapter

_MERGE_UP_TO_BYTES = 64 << 20


class LoraBank(Protocol):
    """A loaded model's adapters, of which at most one is active."""

    def add(self, adapter: ValidatedAdapter) -> str:
        """Adds an adapter without activating it; returns the internal name to pass to `activate` and `remove`."""
        ...

    def activate(self, name: str | None) -> None:
        """Makes the model compute with one adapter, or without any adapter if `name` is `None`."""
        ...

    def remove(self, name: str) -> None:
        """Frees the memory of an adapter; afterwards no adapter is active."""
        ...


def make_bank(model: Any, merge: bool | None = None) -> LoraBank:
    """Returns the bank that is faster for this model: merged for a small float32 one, else PEFT; `merge` overrides."""
    # Merged, a call of a small model takes a fifth less CPU (measured at 0.45M parameters, 32 clients): there LoRA's
    # many small products cost as much as the model itself. But merging is exact in float32 only, and each policy costs
    # a copy of the adapted weights.
    if merge is None:
        weights: list[torch.Tensor] = list(model.parameters())
        size = sum(weight.numel() * weight.element_size() for weight in weights)
        merge = size <= _MERGE_UP_TO_BYTES and all(weight.dtype == torch.float32 for weight in weights)
    return _MergedBank(model) if merge else _PeftBank(model)


class _MergedBank:
    """Keeps, for each policy, a merged copy of every weight that the policy's adapter changes."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._added = 0
        self._active: str | None = None
        self._base: dict[Any, torch.Tensor] = {}  # module -> its own weight
        self._merged: dict[str, dict[Any, torch.Tensor]] = {}

    def add(self, adapter: ValidatedAdapter) -> str:
        merged: dict[Any, torch.Tensor] = {}
        for name, sides in adapter.lora_tensors().items():
            module = self._model.get_submodule(name)
            base = self._base.setdefault(module, module.weight.data)
            a, b = (side.to(base.device, base.dtype) for side in sides)
            merged[module] = base + (b @ a) * adapter.scaling
        # Policy names hold '.' and '@', which module names may not; a number is never used twice.
        self._added += 1
        self._merged[f"lora_{self._added}"] = merged
        return f"lora_{self._added}"

    def activate(self, name: str | None) -> None:
        if name == self._active:
            return
        merged = self._merged[name] if name is not None else {}
        # Every module that any policy adapts, because the last policy may have adapted more of them than this one.
        for module, base in self._base.items():
            module.weight.data = merged.get(module, base)
        self._active = name

    def remove(self, name: str) -> None:
        self.activate(None)
        del self._merged[name]


class _PeftBank:
    """Uses PEFT's layers, injected with the first adapter: a model that never gets an adapter stays unchanged."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._added = 0
        self._active: str | None = None
        self._layers: list[Any] = []

    def add(self, adapter: ValidatedAdapter) -> str:
        from peft import inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        self._added += 1
        name = f"lora_{self._added}"
        config = adapter.peft_config(inference_mode=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PEFT warns of a second adapter, which is what we want
                inject_adapter_in_model(config, self._model, adapter_name=name, low_cpu_mem_usage=True)
            # In the base's precision, as vLLM does: what a policy answers must not depend on the engine.
            adapter.fill(self._model, name)
        finally:
            self._model.eval()
            self._layers = [module for module in self._model.modules() if isinstance(module, LoraLayer)]
            self._switch(None)  # injecting activates
        return name

    def activate(self, name: str | None) -> None:
        if name != self._active:
            self._switch(name)

    def remove(self, name: str) -> None:
        self._switch(None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT warns that it picks another active adapter; all are disabled
            for layer in self._layers:
                if name in layer.lora_A:
                    layer.delete_adapter(name)
        self._model.peft_config.pop(name, None)

    def _switch(self, name: str | None) -> None:
        for layer in self._layers:
            # A layer that this adapter leaves alone must not go on acting for the previous one.
            acting = name is not None and name in layer.lora_A
            layer.enable_adapters(acting)
            if acting:
                layer.set_adapter(name, inference_mode=True)
        self._active = name
