"""Loads the base model with a LoRA for training, by peft or by Unsloth, and computes the LoRA's layers.

The loaded model computes exact log-probabilities, and only the LoRA's weights get a gradient. `fuse` makes a layer one
autograd function instead of peft's modules. The dropout is peft's: it drops inputs of the LoRA. It is on only during
the forward and backward passes of optimizer steps; scores, evaluations and serving are computed without it. Dropout
layers of the base model are always off.

`require_machine` and `require_servable` find a machine or base model on which an update would fail, before any time or
money is spent on it. They do not load the base model's weights.
"""

import ctypes
import platform
import random
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch  # with transformers it takes seconds: import this module only before training
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from art_patch import policies
from art_patch._lib.own_environment import versions_in
from art_patch.errors import AdapterRejected, ConfigError, TrainingError
from art_patch.training.config import TrainConfig
from art_patch.training.families import target_names
from art_patch.training.loop.job import TrainJob
from art_patch.training.loop.unsloth import unsloth_python
from art_patch.training.packed import PackedLinear, pack_layers, weight_of

_REFERENCE = "reference"
_M_MMAP_THRESHOLD = -3  # of glibc's `mallopt`
_OWN_MAPPING_BYTES = 1 << 20  # a tensor of this size, or a larger one, gets a mapping of its own
_CURE = "serve another base, whose checkpoint transformers loads as a causal language model, or as one that also sees"


def backend_of(config: TrainConfig) -> Literal["peft", "unsloth"]:
    """Returns peft, or Unsloth if it is asked for by name; raises `ConfigError` if that cannot be used here."""
    if config.backend != "unsloth":
        return "peft"
    unsloth_python()
    return "unsloth"


def require_machine(config: TrainConfig) -> None:
    """Raises `ConfigError` if this machine lacks the config's backend, or has GPUs, but fewer than `processes`."""
    backend_of(config)
    gpus = torch.cuda.device_count()
    if gpus and config.processes > gpus:
        raise ConfigError(f"processes={config.processes}, but there are {gpus} GPUs; take at most as many")


def made_with(config: TrainConfig) -> dict[str, Any]:
    """Returns what the rounding of an update on this machine depends on: packages, device and number of threads."""
    device, backend, packages = default_device(), backend_of(config), ("torch", "transformers", "peft")
    cpu = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    # Of the environment that computes, which is another one than this process's where Unsloth has its own.
    of_unsloth = backend == "unsloth" and versions_in(unsloth_python(), (*packages, "unsloth"))
    return {
        **(of_unsloth or {name: version(name) for name in packages}),
        "backend": backend,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "threads": torch.get_num_threads(),
    }


def load(job: TrainJob, device: torch.device) -> Any:
    """Loads the base model with the LoRA that the update starts from, by the backend of this machine."""
    load_by = load_with_unsloth if backend_of(job.config) == "unsloth" else load_policy
    return load_by(job.base, job.parent, job.config, device=device)


def load_policy(base: str, adapter: Path | None, config: TrainConfig, *, device: torch.device | None = None) -> Any:
    """Loads the base model with a LoRA by peft. All dropout is off until `dropout_on` switches the LoRA's on.

    `base` is a model directory or hub id, `adapter` the directory of the LoRA to continue. Without one, a new LoRA is
    added, with which the model computes the same as without it until the first optimizer step.
    """
    import transformers
    from peft import LoraConfig, PeftModel, get_peft_model

    transformers.utils.logging.disable_progress_bar()  # the cycle shows its own
    # peft 0.21 asks transformers 5.23 by the old name
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    device = device or default_device()
    torch.manual_seed(config.seed)  # of a new LoRA's weights
    dtype = _weights_dtype(config, device)
    packs = config.base_bits < 16
    # A checkpoint that keeps its own precision is only mapped: nothing of it is in memory until it is packed.
    model: Any = policies.load_model(base, dtype="auto" if packs else dtype)
    if packs:
        pack_layers(model, target_names(model), config.base_bits, dtype, device)
    if adapter is None:
        lora = LoraConfig(
            r=config.lora_rank, lora_alpha=config.lora_alpha, lora_dropout=config.lora_dropout,
            target_modules=target_names(model), task_type="CAUSAL_LM",
        )  # fmt: skip
        model = get_peft_model(model, lora)
    else:
        kept: Any = LoraConfig.from_pretrained(str(adapter))
        kept.lora_dropout = config.lora_dropout
        model = PeftModel.from_pretrained(model, str(adapter), config=kept, is_trainable=True)
    model.to(device)
    model.eval()
    fuse(model)
    if _recomputes(config, device):
        _recompute_blocks(model)
    return model


def load_with_unsloth(base: str, adapter: Path | None, config: TrainConfig, *, device: torch.device) -> Any:
    """Loads the base model with a LoRA by Unsloth (https://unsloth.ai/docs).

    Arguments and result are those of `load_policy`. Call it only in a process that imported Unsloth before
    transformers. Its tests need a GPU (`tests/gpu/test_unsloth.py`).
    """
    from unsloth import FastLanguageModel  # type: ignore[import-not-found]  # isort: skip  # first of all
    from peft import LoraConfig, load_peft_weights, set_peft_model_state_dict

    model, _ = FastLanguageModel.from_pretrained(
        model_name=base, max_seq_length=config.max_tokens, dtype=_weights_dtype(config, device), load_in_4bit=False,
        device_map={"": device.index or 0},
    )  # fmt: skip
    kept: Any = None if adapter is None else LoraConfig.from_pretrained(str(adapter))
    model = FastLanguageModel.get_peft_model(
        model,
        r=config.lora_rank if kept is None else kept.r,
        lora_alpha=config.lora_alpha if kept is None else kept.lora_alpha,
        target_modules=target_names(model) if kept is None else sorted(kept.target_modules),
        lora_dropout=config.lora_dropout,  # Unsloth's kernels for a LoRA are for 0; else it takes peft's way
        bias="none",
        use_gradient_checkpointing="unsloth" if _recomputes(config, device) else False,
        random_state=config.seed,
    )
    if adapter is not None:
        set_peft_model_state_dict(model, load_peft_weights(str(adapter), device=str(device)))
    dropout_off(model)
    return model


def default_device(rank: int = 0) -> torch.device:
    """Returns the GPU for the process number `rank` of an update, or the CPU if the machine has no GPU."""
    return torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")


def give_memory_back(device: torch.device) -> None:
    """Lets this process give the memory of a large tensor back to the machine as soon as the tensor is freed.

    glibc stops doing so after the first large tensor that is freed, and takes tensors of up to 32 MiB from its heap.
    Tensors that stay, such as what a layer keeps for the backward pass, leave holes there that fit no other tensor. An
    update in 4 bits that recomputes its blocks needed 1.2 to 1.5 GiB instead of .6. Without glibc nothing is changed.
    """
    if device.type == "cpu" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING_BYTES)


def _weights_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, config.dtype)


def _recomputes(config: TrainConfig, device: torch.device) -> bool:
    return device.type == "cuda" if config.gradient_checkpointing is None else config.gradient_checkpointing


def _recompute_blocks(model: torch.nn.Module) -> None:
    from transformers.modeling_layers import GradientCheckpointingLayer

    # transformers' own switch ties it to training mode, which would switch dropout on too. So each block is told by
    # itself that it is in training, and the layers in it are not.
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            block: Any = module
            block.gradient_checkpointing = True
            block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
            block.training = True


@contextmanager
def as_reference(model: Any, adapter: Path | None) -> Generator[None]:
    """Makes a model compute as the reference inside the block: with the LoRA `adapter`, or as the base if `None`."""
    if adapter is None:
        with model.disable_adapter():
            yield
        return
    trained = model.active_adapter
    # peft puts the whole model in evaluation mode when it loads a LoRA; then no block would be recomputed afterwards.
    modes = [(module, module.training) for module in model.modules()]
    model.load_adapter(str(adapter), _REFERENCE)
    model.set_adapter(_REFERENCE)
    try:
        yield
    finally:
        model.set_adapter(trained)
        model.delete_adapter(_REFERENCE)
        for module, training in modes:
            module.training = training


def require_servable(base: str) -> None:
    """Raises `ConfigError` if a base model cannot be trained, or if the engine would reject every LoRA for it.

    `base` is a model directory or hub id. The model is built from its config on torch's meta device, without weights. A
    LoRA of zeros for its layers is then checked with `check_content`, which every published adapter must pass.
    """
    from safetensors.numpy import save

    directory = policies.resolve_model_dir(base)
    base_model = policies.read_base_model(directory)
    try:
        config = policies.read_config(directory)
        with torch.device("meta"):
            model: Any = policies.auto_class(config).from_config(config)
        targets = target_names(model)
    except (ImportError, ValueError, TrainingError, AttributeError, KeyError, TypeError) as error:
        # transformers raises errors of many kinds for a config that it does not understand
        why = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(f"{base} cannot be trained: {why}; {_CURE}") from error
    ends = tuple(f".{target}" for target in targets)
    shapes = {name: module.weight.shape for name, module in model.named_modules() if f".{name}".endswith(ends)}
    zeros = {
        policies.lora_key(name, side): np.zeros(shape, np.float32)
        for name, (rows, columns) in shapes.items()
        for side, shape in (("A", (1, columns)), ("B", (rows, 1)))
    }
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": targets}
    try:
        policies.check_content("a LoRA of it", settings, save(zeros), base_model)
    except AdapterRejected as error:
        # Checkpoints of models that also see name their modules otherwise than transformers does.
        missing = sorted(name for name in shapes if f"{name}.weight" not in base_model.weight_shapes)
        why = f"its checkpoint has no {policies.some(missing)}" if missing else str(error)
        raise ConfigError(
            f"{base} cannot be trained: the engine would refuse every LoRA of a {config.model_type}, because {why}; "
            f"{_CURE}"
        ) from error


def fuse(model: nn.Module) -> int:
    """Replaces the computation of the model's LoRA layers by a faster one with the same result.

    Returns the number of layers that were replaced. peft computes a linear layer with a LoRA as four modules and a sum.
    Here the sums are part of the matrix products, and no gradient is computed for the base's frozen weight. The product
    of A and B is not merged into the base weight, because in bf16 a small update would be lost by rounding. peft still
    computes a layer with DoRA, several adapters at once, or dropout that is on at the call.
    """
    from peft.tuners.lora import Linear

    plain = (nn.Linear, PackedLinear)
    layers = [module for module in model.modules() if type(module) is Linear and type(module.base_layer) in plain]
    for layer in layers:
        # On the instance: peft's class stays as it is for every other model of the process.
        layer.forward = _forward_of(layer, layer.forward)
    return len(layers)


def _forward_of(layer: Any, plain: Any) -> Any:
    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        name = _the_adapter(layer)  # asked at every call: adapters are switched off and on, and so is dropout
        if name is None or args or kwargs:
            return plain(x, *args, **kwargs)
        return _LoraLinear.apply(  # type: ignore[no-any-return]
            x, layer.base_layer, layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]
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
    def forward(ctx: Any, x: Tensor, base: Any, a: Tensor, b: Tensor, scale: float) -> Tensor:
        flat, weight = x.reshape(-1, x.shape[-1]), weight_of(base)
        # A and B are fp32, and the base may be bf16: they are rounded here to the precision of the products alone.
        down = flat @ a.to(x.dtype).T
        out = flat @ weight.T if base.bias is None else torch.addmm(base.bias, flat, weight.T)
        out.addmm_(down, b.to(x.dtype).T, alpha=scale)
        ctx.save_for_backward(flat, down, a, b)
        ctx.base, ctx.scale, ctx.shape = base, scale, x.shape
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        flat, down, a, b = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        # The narrow matrix first: the other way round the same product takes five times as long.
        of_b = (down.T @ grad).T.mul(ctx.scale).to(b.dtype)
        up = (grad @ b.to(grad.dtype)).mul_(ctx.scale)
        of_a = (up.T @ flat).to(a.dtype)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = (grad @ weight_of(ctx.base)).addmm_(up, a.to(grad.dtype)).view(ctx.shape)
        return of_x, None, of_a, of_b, None


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
