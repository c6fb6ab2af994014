"""Computes each LoRA layer of a model with one autograd function instead of peft's modules, and controls its dropout.

The dropout is peft's: it drops inputs of the LoRA. It is on only during the forward and backward passes of optimizer
steps; scores, evaluations and serving are computed without it. Dropout layers of the base model are always off.
"""

import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from art_patch.training.config import TrainConfig


def fuse(model: nn.Module) -> int:
    """Replaces the computation of the model's LoRA layers by a faster one with the same result.

    Returns the number of layers that were replaced. peft computes a linear layer with a LoRA as four modules and a sum.
    Here the sums are part of the matrix products, and no gradient is computed for the base's frozen weight. The product
    of A and B is not merged into the base weight, because in bf16 a small update would be lost by rounding. peft still
    computes a layer with DoRA, several adapters at once, a quantised base weight, or dropout that is on at the call.
    """
    from peft.tuners.lora import Linear

    layers = [module for module in model.modules() if type(module) is Linear and type(module.base_layer) is nn.Linear]
    for layer in layers:
        # On the instance: peft's class stays as it is for every other model of the process.
        layer.forward = _forward_of(layer, layer.forward)
    return len(layers)


def _forward_of(layer: Any, plain: Any) -> Any:
    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        name = _the_adapter(layer)  # asked at every call: adapters are switched off and on, and so is dropout
        if name is None or args or kwargs:
            return plain(x, *args, **kwargs)
        base = layer.base_layer
        return _LoraLinear.apply(  # type: ignore[no-any-return]
            x, base.weight, base.bias, layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]
        )

    return forward


def _the_adapter(layer: Any) -> str | None:
    """Returns the name of the one plain adapter that is on; `None` if the layer is in any other state."""
    if layer.disable_adapters or layer.merged or len(layer.active_adapters) != 1:
        return None
    name = layer.active_adapters[0]
    if name not in layer.lora_A or name in layer.lora_variant or layer.lora_bias[name]:
        return None
    dropout = layer.lora_dropout[name]
    return None if dropout.training and not isinstance(dropout, nn.Identity) else name


class _LoraLinear(torch.autograd.Function):
    """Computes `x W' + bias + scale (x A') B'`; a prime means transposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        # A and B are fp32, and the base may be bf16: they are rounded here to the precision of the products alone.
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


def dropout_off(model: Any) -> None:
    """Switches the dropout of every LoRA layer of `model` off, so that its log-probabilities are exact."""
    for layer in _dropout_layers(model):
        layer.eval()


@contextmanager
def dropout_on(model: Any, config: TrainConfig, step: int, rank: int) -> Generator[None]:
    """Switches the LoRA's dropout on inside the block and off at its end; nothing if `config.lora_dropout` is 0."""
    if not config.lora_dropout:
        yield
        return
    # The masks depend on seed, step and process alone. So an update that was killed goes on with the masks that it
    # would have had, on a GPU too, whose state of random numbers no checkpoint keeps.
    torch.manual_seed(random.Random(f"{config.seed} dropout {step} {rank}").getrandbits(63))
    for layer in _dropout_layers(model):
        layer.train()
    try:
        yield
    finally:
        dropout_off(model)


def _dropout_layers(model: Any) -> list[nn.Module]:
    from peft.tuners.lora import LoraLayer

    return [
        dropout
        for module in model.modules()
        if isinstance(module, LoraLayer)
        for dropout in module.lora_dropout.values()  # type: ignore[reportUnknownMemberType]
    ]
