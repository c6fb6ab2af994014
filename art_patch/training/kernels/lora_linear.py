"""peft's LoRA layer as one autograd step: the same numbers, fewer passes over the tokens.

peft computes a linear layer with a LoRA as four modules and a sum, and autograd walks back through each. Here the sums
happen inside the matrix products, and the base's weight, which is frozen, gets no gradient (the manual backward that
Unsloth describes). The product is not merged into the base: in bf16 a small update would be rounded away.

A layer that is anything but plain (DoRA, several adapters at once, a quantised base) keeps peft's own way, and so does
one whose dropout is on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def fuse(model: nn.Module) -> int:
    """Change how the LoRA layers of `model` compute; return how many."""
    from peft.tuners.lora import Linear

    layers = [module for module in model.modules() if type(module) is Linear and type(module.base_layer) is nn.Linear]
    for layer in layers:
        layer.forward = _forward_of(layer, layer.forward)
    return len(layers)


def _forward_of(layer: Any, plain: Any) -> Any:
    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        name = _the_adapter(layer)
        if name is None or args or kwargs:
            return plain(x, *args, **kwargs)
        base = layer.base_layer
        return _LoraLinear.apply(  # type: ignore[no-any-return]
            x, base.weight, base.bias, layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]
        )

    return forward


def _the_adapter(layer: Any) -> str | None:
    """Name of the one plain adapter that is on, if that is how it is."""
    if layer.disable_adapters or layer.merged or len(layer.active_adapters) != 1:
        return None
    name = layer.active_adapters[0]
    plain = (
        name in layer.lora_A
        and name not in layer.lora_variant
        and not _drops(layer.lora_dropout[name])
        and not layer.lora_bias[name]
    )
    return name if plain else None


def _drops(dropout: nn.Module) -> bool:
    return dropout.training and not isinstance(dropout, nn.Identity)


class _LoraLinear(torch.autograd.Function):
    """`x W' + bias + scale (x A') B'`; a prime means transposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        down = flat @ a.to(x.dtype).T
        out = flat @ weight.T if bias is None else torch.addmm(bias, flat, weight.T)
        out.addmm_(down, b.to(x.dtype).T, alpha=scale)
        ctx.save_for_backward(flat, down, weight, a, b)
        ctx.scale, ctx.shape = scale, x.shape
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        flat, down, weight, a, b = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        # The narrow matrix first: the other way round the same product takes five times as long.
        of_b = (down.T @ grad).T.mul(ctx.scale).to(b.dtype)
        up = (grad @ b.to(grad.dtype)).mul_(ctx.scale)
        of_a = (up.T @ flat).to(a.dtype)
        of_x = (grad @ weight).addmm_(up, a.to(grad.dtype)).view(ctx.shape) if ctx.needs_input_grad[0] else None
        return of_x, None, None, of_a, of_b, None
