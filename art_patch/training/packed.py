"""Keeps the frozen weights of a base model in 4 or 8 bits while a LoRA on them is trained.

Only the linear layers that get a LoRA are packed; embeddings, head, norms and routed experts stay as they are. Weights
are packed in blocks of 64 with a scale each: in 4 bits as NF4, whose levels are the quantiles of a normal distribution
(QLoRA, https://arxiv.org/abs/2305.14314), in 8 bits as whole numbers. A layer is unpacked for each product and dropped
again, in the backward pass too, so that one matrix at a time is whole. Inputs and gradients are not packed.

The checkpoint's own weights stay reachable: transformers maps the file into memory, and `PackedLinear` keeps that
mapping and gives its pages back. So packing needs no memory for a whole model, and inside `exact()` layers compute with
the checkpoint's weights, as the server does. The probe of a policy is made so.
"""

import ctypes
import mmap
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from art_patch.errors import ConfigError

_BLOCK = 64
# The levels of NF4, as in the paper and in bitsandbytes.
_NF4 = torch.tensor(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]
)  # fmt: skip
_BETWEEN = (_NF4[1:] + _NF4[:-1]) / 2
_MADV_DONTNEED = getattr(mmap, "MADV_DONTNEED", 4)


class PackedLinear(nn.Linear):
    """A frozen linear layer whose weight is packed. `weight` holds the codes: unpack it before any arithmetic."""

    def __init__(self, plain: nn.Linear, bits: int, dtype: torch.dtype, device: torch.device) -> None:
        """Packs the weight of `plain`, which computes in `dtype` on `device` from now on."""
        nn.Module.__init__(self)  # not that of `nn.Linear`, which would make a weight
        self.in_features, self.out_features, self.bias = plain.in_features, plain.out_features, plain.bias
        self._dtype = dtype
        self._original = plain.weight.detach()
        codes, self._scale = pack(self._original.to(device), bits)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.exact = False
        _give_back(self._original)

    def unpacked(self) -> Tensor:
        """Returns the weight (outputs, inputs) as the layer computes with it."""
        if not self.exact:
            return unpack(self.weight, self._scale, self._dtype).view(self.out_features, self.in_features)
        whole = self._original.to(self.weight.device, self._dtype, copy=True)
        _give_back(self._original)
        return whole

    def forward(self, input: Tensor) -> Tensor:
        """Computes the layer; nothing but its input's gradient is computed backwards."""
        out: Any = _Frozen.apply(input, self)
        bias: Any = self.bias  # `None` where the layer has none
        return out if bias is None else out + bias


class _Frozen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: PackedLinear) -> Tensor:
        ctx.layer = layer
        return x @ layer.unpacked().T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] @ ctx.layer.unpacked(), None


def weight_of(layer: nn.Linear) -> Tensor:
    """Returns the weight that a linear layer computes with, unpacked where it is packed."""
    return layer.unpacked() if isinstance(layer, PackedLinear) else layer.weight


def pack(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Returns the codes of a weight, and the scale of each block of 64 values in the order of its memory."""
    blocks = weight.float().view(-1, _BLOCK)
    scale = blocks.abs().amax(1, keepdim=True).clamp_(1e-7, 6e4).half()
    shares = blocks / scale.float()
    if bits == 8:
        return (shares * 127).round_().to(torch.int8).view(-1), scale
    codes = torch.bucketize(shares, _BETWEEN.to(weight.device), out_int32=True).to(torch.uint8).view(-1, 2)
    return codes[:, 0] << 4 | codes[:, 1], scale


def unpack(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the values of `pack` as blocks (..., 64)."""
    if codes.dtype == torch.int8:
        return codes.view(-1, _BLOCK).to(dtype).mul_(scale.to(dtype) / 127)
    # Both values of a byte are looked up at once.
    pairs = torch.cartesian_prod(_NF4, _NF4).to(codes.device, dtype)
    return pairs.index_select(0, codes.int()).view(-1, _BLOCK).mul_(scale.to(dtype))


def pack_layers(model: nn.Module, targets: Iterable[str], bits: int, dtype: torch.dtype, device: torch.device) -> None:
    """Packs linear layers of a model that is on the CPU, one by one; what else it has gets `dtype`.

    `targets` are peft's `target_modules`: names of layers, or how they end.

    Raises `ConfigError` if transformers did not map the checkpoint into memory.
    """
    ends, loaded = tuple(f".{target}" for target in targets), cast("Any", model).dtype
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and f".{name}".endswith(ends) and layer.weight.numel() % _BLOCK == 0:
            model.set_submodule(name, PackedLinear(layer, bits, dtype, device))
    for weight in model.parameters():
        if weight.dtype == loaded:  # others stay in float32 in every model
            weight.data = weight.data.to(dtype)


@contextmanager
def exact(model: nn.Module) -> Generator[None]:
    """Makes packed layers compute with the checkpoint's weights inside the block, one matrix at a time."""
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    for layer in packed:
        layer.exact = True
    try:
        yield
    finally:
        for layer in packed:
            layer.exact = False


def _give_back(mapped: Tensor) -> None:
    """Gives the memory of a tensor back that a file is mapped to; the next look reads the file again."""
    page = mmap.PAGESIZE
    first = -(-mapped.data_ptr() // page) * page  # only whole pages: others have a part of another tensor
    length = (mapped.data_ptr() + mapped.nbytes) // page * page - first
    if length <= 0:
        return
    before = mapped.view(torch.uint8).view(-1)[-2 * page :].clone()
    ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_DONTNEED)
    if not torch.equal(before, mapped.view(torch.uint8).view(-1)[-2 * page :]):
        raise ConfigError(
            "base_bits needs a checkpoint of safetensors files that can be mapped into memory, on a disk of this "
            "machine; copy the base there, or leave base_bits out"
        )
