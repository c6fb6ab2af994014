"""Validates every LoRA: its files before an engine loads it, and with its probe what the engine computes with it.

`validate_adapter` reads a published adapter directory once and returns the same bytes that it checked. So no other
process can replace a file between the check and the load. A file or tensor that is unsafe, unknown or of the wrong
shape raises an `AdapterRejected` that names it and the remedy. The check is needed because vLLM loads most unsuitable
LoRAs without an error, and a single NaN in a LoRA spoils the answers of every policy that vLLM serves.

When a policy is published, the trainer writes the log-probabilities of a few tokens into the manifest, with and without
the new LoRA: the probe. A server that has loaded the LoRA scores the same tokens. If it applies the LoRA to the wrong
layers, with the wrong scaling or not at all, its numbers differ, and it reports no error itself (vLLM issue 34186).

Importing this module loads neither torch nor transformers.
"""

import hashlib
import math
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors import SafetensorError, deserialize

from art_patch.errors import AdapterRejected
from art_patch.policies import files
from art_patch.policies.base_models import BaseModel
from art_patch.policies.files import CONFIG, MANIFEST, WEIGHTS, some

LORA_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# Integer view and exponent mask of each dtype: all exponent bits set means inf or NaN. numpy has no bfloat16.
_EXPONENT_BITS = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
_MOST_ALPHA = 1e9  # of `lora_alpha`, which is of the size of the rank
# Settings that change what an adapter computes in ways that one engine or the other does not follow. Only these values
# of them are understood; anything else is refused.
_SWITCHES = ("lora_bias", "use_dora", "use_qalora", "use_bdlora", "fan_in_fan_out", "ensure_weight_tying")
_LISTS = (
    "modules_to_save", "exclude_modules", "target_parameters", "layers_to_transform", "layers_pattern",
    "layer_replication", "alora_invocation_tokens",
)  # fmt: skip
_ONLY_VALUES: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    **dict.fromkeys(_SWITCHES, (False, None)),
    **dict.fromkeys(_LISTS, (None, [])),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), (None, {})),
    "trainable_token_indices": (None, [], {}),
    **dict.fromkeys(("arrow_config", "megatron_config"), (None,)),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal"),
}

ENTRY = "probe"  # of the manifest
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")
_MOST_TOKENS = 1_024  # of a probe; the trainer's has 48

# Largest and mean difference, in nats a token, that two correct implementations show. In float32 2.4e-6 was measured
# between vLLM and transformers, in bfloat16 5.2e-2 with a mean of 5.4e-3. GPUs sum in other orders, so each bound is
# several times as wide.
_TOLERANCE = {"float32": (1e-3, 1e-4), "float16": (0.25, 0.02), "bfloat16": (0.5, 0.05)}

# What a LoRA may add to a weight. Weights are about 1 at most, and training adds a small part of that.
_MOST_CHANGE = 1e3


@dataclass(frozen=True, slots=True)
class Probe:
    """A few tokens and the log-probabilities that the trainer computed for them, at temperature 1."""

    token_ids: tuple[int, ...]  # the context tokens. At each position but the last, one possible next token is scored
    logprobs: tuple[float, ...]  # log-probability of each scored token with the LoRA; one fewer than `token_ids`
    base_logprobs: tuple[float, ...]  # log-probability of the same tokens under the base model without the LoRA
    dtype: str  # precision in which the trainer computed, such as "bfloat16"
    # The scored tokens: at each position the likeliest next one with the LoRA, because engines report no others. In
    # older manifests the list is empty, and the scored token is the next one of `token_ids`.
    target_ids: tuple[int, ...] = ()

    @property
    def targets(self) -> tuple[int, ...]:
        """Ids of the scored tokens: one after each of `token_ids` but the last."""
        return self.target_ids or self.token_ids[1:]

    def entry(self) -> dict[str, Any]:
        """Returns the probe as a JSON object, which `read_probe` reads from the manifest."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class ValidatedAdapter:
    """An adapter that passed `validate_adapter`, with the bytes that were checked."""

    name: str  # of the policy, NAME@STEP
    directory: Path  # with all symbolic links resolved
    rank: int  # the same for every module
    config: dict[str, Any]  # parsed content of `adapter_config.json`
    weights: bytes = field(repr=False)  # content of `adapter_model.safetensors`
    modules: tuple[str, ...] = field(repr=False)  # the base model's linear layers that the LoRA changes, sorted
    sha256: str  # of `weights`, as hex digits
    probe: Probe | None = field(default=None, repr=False)

    @property
    def scaling(self) -> float:
        """The factor s in `W + s B A`, the weight of a layer with the LoRA's matrices A and B."""
        return _scaling(self.config, self.rank)

    def lora_tensors(self) -> dict[str, tuple[Any, Any]]:
        """Parses the weights: returns the torch tensors A (rank, inputs) and B (outputs, rank) by module name."""
        from safetensors.torch import load

        tensors = load(self.weights)
        return {module: (tensors[lora_key(module, "A")], tensors[lora_key(module, "B")]) for module in self.modules}

    def peft_config(self, **more: Any) -> Any:
        """Returns a `peft.LoraConfig` with this LoRA's rank, scale and modules; `more` sets further fields of it."""
        from peft import LoraConfig

        return LoraConfig(
            r=self.rank,
            lora_alpha=self.config["lora_alpha"],
            use_rslora=bool(self.config.get("use_rslora")),
            lora_dropout=0.0,  # of training alone
            target_modules=list(self.modules),
            **more,
        )

    def fill(self, model: Any, layers: str, dtype: Any = None) -> None:
        """Copies the weights into `model` as a frozen peft adapter; `dtype` `None` takes each layer's own."""
        import torch

        for module, sides in self.lora_tensors().items():
            layer = model.get_submodule(module)
            base = layer.get_base_layer().weight
            for tensor, weights in zip(sides, (layer.lora_A, layer.lora_B), strict=True):
                own = tensor.to(base.device, dtype or base.dtype)
                weights[layers].weight = torch.nn.Parameter(own, requires_grad=False)


def lora_key(module: str, side: str) -> str:
    """Returns the tensor name, in an adapter's weights file, of the LoRA matrix `side` ("A" or "B") of `module`."""
    return f"base_model.model.{module}.lora_{side}.weight"


def _scaling(config: Mapping[str, Any], rank: int) -> float:
    return config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)


def validate_adapter(
    adapters_root: str | os.PathLike[str], name: str, base: BaseModel, *, max_rank: int = 64, max_bytes: int = 8 << 30
) -> ValidatedAdapter:
    """Reads and checks one published adapter, or raises `AdapterRejected` with the reason and the remedy."""
    directory = files.adapter_directory(Path(adapters_root), files.check_name(name))
    manifest = files.read_json(directory, MANIFEST)
    contents = files.read_verified(directory, manifest, max_bytes)
    if manifest.get("base_sha256") != base.sha256:
        raise AdapterRejected(
            f"{name}: {MANIFEST} was written for another base model (base_sha256 {manifest.get('base_sha256')!r}, "
            f"serving {base.sha256!r}). Train it again from {base.directory}, or serve the base it was trained on.",
            final=False,  # another base may serve later
        )
    config = files.parse_object(name, CONFIG, contents[CONFIG])
    rank, modules = check_content(name, config, contents[WEIGHTS], base, max_rank=max_rank)
    digest = hashlib.sha256(contents[WEIGHTS]).hexdigest()
    probe = read_probe(name, manifest, base)
    return ValidatedAdapter(name, directory, rank, config, contents[WEIGHTS], modules, digest, probe)


def check_content(
    name: str, config: Mapping[str, Any], weights: bytes, base: BaseModel, *, max_rank: int = 64
) -> tuple[int, tuple[str, ...]]:
    """Checks the contents of `adapter_config.json` and `adapter_model.safetensors` against the base model.

    Returns the rank and the names of the base model's modules that the LoRA changes, or raises `AdapterRejected`.
    """
    rank = check_config(name, config, max_rank)
    try:
        tensors = cast("list[tuple[str, dict[str, Any]]]", deserialize(weights))
    except SafetensorError as error:
        raise AdapterRejected(
            f"{name}: {WEIGHTS} is not a whole safetensors file ({error}). Publish it again with publish_adapter()."
        ) from error
    sides: dict[str, dict[str, float]] = {}
    for key, tensor in sorted(tensors, key=lambda item: item[0]):
        module, side, largest = _check_tensor(name, key, tensor, rank, base)
        sides.setdefault(module, {})[side] = largest
    if halves := sorted(module for module, found in sides.items() if len(found) != 2):
        raise AdapterRejected(f"{name}: {WEIGHTS} holds only one of lora_A and lora_B for {some(halves)}. Save both.")
    _check_targets(name, config.get("target_modules"), set(sides), base)
    _check_size(name, config, rank, sides)
    return rank, tuple(sorted(sides))


def check_config(name: str, config: Mapping[str, Any], max_rank: int) -> int:
    """Checks the settings in `adapter_config.json`, but for `target_modules`; returns the rank."""
    if config.get("peft_type") != "LORA":
        raise AdapterRejected(
            f"{name}: {CONFIG}: peft_type is {config.get('peft_type')!r:.100}; only 'LORA' is served."
        )
    for key, allowed in _ONLY_VALUES.items():
        if key in config and config[key] not in allowed:
            raise AdapterRejected(
                f"{name}: {CONFIG}: {key} = {config[key]!r:.100} is not served. Train with {key} = {allowed[0]!r}."
            )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= max_rank:
        raise AdapterRejected(
            f"{name}: {CONFIG}: r = {rank!r:.100}; this engine serves ranks 1 to {max_rank}. "
            "Train a smaller rank, or start the server with a larger --max-lora-rank."
        )
    if type(alpha) not in (int, float) or not 0 < cast("float", alpha) < _MOST_ALPHA:
        raise AdapterRejected(f"{name}: {CONFIG}: lora_alpha = {alpha!r:.100} is not a positive number.")
    return rank


def _check_tensor(name: str, key: str, tensor: Mapping[str, Any], rank: int, base: BaseModel) -> tuple[str, str, float]:
    """Returns the module, the side (A or B) and the largest absolute value in the tensor."""
    match = LORA_KEY.fullmatch(key)
    if match is None:
        raise AdapterRejected(
            f"{name}: tensor {key} is no LoRA weight of this base. Keys read base_model.model.MODULE.lora_A.weight."
        )
    module, side = match["module"], match["side"]
    weight = base.weight_shapes.get(f"{module}.weight")
    if weight is None:
        raise AdapterRejected(
            f"{name}: tensor {key} names module {module}, which the base model {base.directory} does not have. "
            "Train on the base that is served."
        )
    if len(weight) != 2 or module.endswith("embed_tokens"):
        raise AdapterRejected(f"{name}: tensor {key}: {module} is not a linear layer. Take it out of target_modules.")
    shape = tuple(cast("list[int]", tensor["shape"]))
    if len(shape) == 2 and shape[0 if side == "A" else 1] != rank:
        raise AdapterRejected(
            f"{name}: tensor {key} has shape {shape}, but {CONFIG} says r = {rank}: the scaling would be wrong. "
            "Save config and weights of the same adapter."
        )
    expected = (rank, weight[1]) if side == "A" else (weight[0], rank)
    if shape != expected:
        raise AdapterRejected(
            f"{name}: tensor {key} has shape {shape}; the base weight {weight} needs {expected}. "
            "Train on the base that is served."
        )
    if tensor["dtype"] not in _EXPONENT_BITS:
        raise AdapterRejected(f"{name}: tensor {key} has dtype {tensor['dtype']}. Save it as float32 or bfloat16.")
    # On the bits as integers: numpy has no bfloat16, and of numbers without a sign the order is that of their bits. So
    # the largest magnitude also tells whether any is NaN or infinite.
    view, mask = _EXPONENT_BITS[tensor["dtype"]]
    bits = np.frombuffer(cast("bytes", tensor["data"]), dtype=view)
    magnitude = bits & bits.dtype.type((1 << (8 * bits.dtype.itemsize - 1)) - 1)  # without the sign
    largest = magnitude.max() if len(magnitude) else bits.dtype.type(0)
    if int(largest) >= mask:
        raise AdapterRejected(f"{name}: tensor {key} holds NaN or infinity. The training diverged; drop this step.")
    return module, side, _value(int(largest), tensor["dtype"])


def _value(bits: int, dtype: str) -> float:
    """Returns the number of precision `dtype` that has these bits and no sign."""
    if dtype == "BF16":
        bits, dtype = bits << 16, "F32"  # the upper half of a float32
    width, code = {"F64": (8, "<d"), "F32": (4, "<f"), "F16": (2, "<e")}[dtype]
    return float(struct.unpack(code, bits.to_bytes(width, "little"))[0])


def _check_size(name: str, config: Mapping[str, Any], rank: int, sides: Mapping[str, Mapping[str, float]]) -> None:
    # Finite weights can still overflow in the forward pass, and one NaN in a cache spoils every policy that is served.
    for module, largest in sides.items():
        change = _scaling(config, rank) * rank * largest["A"] * largest["B"]
        if change > _MOST_CHANGE:
            raise AdapterRejected(
                f"{name}: it may change a weight of {module} by {change:.2g}, more than {_MOST_CHANGE:g}. "
                "The training diverged; drop this step."
            )


def _check_targets(name: str, targets: object, found: set[str], base: BaseModel) -> None:
    modules = [key.removesuffix(".weight") for key in base.weight_shapes if key.endswith(".weight")]
    if isinstance(targets, str) and targets != "all-linear":
        check_pattern(name, "target_modules", targets)
        try:
            expected = {module for module in modules if re.fullmatch(targets, module)}
        except re.error as error:
            raise AdapterRejected(f"{name}: {CONFIG}: target_modules is no regular expression ({error}).") from error
    elif isinstance(targets, list) and targets and all(isinstance(item, str) for item in cast("list[Any]", targets)):
        suffixes = cast("list[str]", targets)
        expected = {module for module in modules if any(f".{module}".endswith(f".{suffix}") for suffix in suffixes)}
    else:
        raise AdapterRejected(f"{name}: {CONFIG}: target_modules = {targets!r}. Give the list of module names.")
    if missing := sorted(expected - found):
        raise AdapterRejected(
            f"{name}: {WEIGHTS} lacks {some(missing)}, which target_modules names. Save the whole adapter."
        )
    if surplus := sorted(found - expected):
        raise AdapterRejected(
            f"{name}: {WEIGHTS} holds {some(surplus)}, which target_modules does not name: it would be left out "
            "silently. Save config and weights of the same adapter."
        )


def check_pattern(name: str, where: str, pattern: str) -> None:
    """Refuses a regular expression that may take forever on the name of a module."""
    most = len(re.findall(r"[*+{]", pattern)) <= 3 and len(re.findall(r"[?|]", pattern)) <= 12
    if not most or re.search(r"\)[*+{?]", pattern):
        raise AdapterRejected(
            f"{name}: {CONFIG}: {where} has the pattern {pattern!r:.100}, which may take forever; write out the names"
        )


def read_probe(name: str, manifest: Mapping[str, Any], base: BaseModel) -> Probe | None:
    """Returns the probe in the manifest of the policy `name`; `None` if the manifest has no probe."""
    fields: Any = manifest.get(ENTRY)
    if fields is None:
        return None
    try:
        probe = Probe(
            tuple(map(int, fields["token_ids"])),
            tuple(map(float, fields["logprobs"])),
            tuple(map(float, fields["base_logprobs"])),
            str(fields["dtype"]),
            tuple(map(int, fields.get("target_ids") or ())),
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        why = f"{error!r:.200}"
        raise AdapterRejected(f"{name}: the manifest's probe cannot be read ({why}). Publish it again.") from error
    if len(probe.token_ids) > _MOST_TOKENS:
        raise AdapterRejected(f"{name}: the manifest's probe has more than {_MOST_TOKENS} tokens. Publish it again.")
    # An engine on a GPU may not survive a token that its embedding lacks.
    tokens = min((shape[0] for key, shape in base.weight_shapes.items() if key.endswith(_EMBEDDINGS)), default=1 << 31)
    if not all(0 <= token < tokens for token in probe.token_ids + probe.target_ids):
        raise AdapterRejected(f"{name}: the manifest's probe has tokens that the base lacks. Publish it again.")
    places = len(probe.token_ids) - 1
    if not len(probe.logprobs) == len(probe.base_logprobs) == len(probe.targets) == places or not places:
        raise AdapterRejected(f"{name}: the manifest's probe has the wrong number of values. Publish it again.")
    if not all(math.isfinite(value) for value in probe.logprobs + probe.base_logprobs):
        raise AdapterRejected(
            f"{name}: the trainer's own log-probabilities are not finite. The training diverged; drop this step."
        )
    return probe


def check_probe(
    name: str, probe: Probe, served: Sequence[float], base_served: Sequence[float] | None, *, dtype: str
) -> float:
    """Compares a server's log-probabilities with the trainer's and returns the largest difference in nats.

    Args:
        served: The server's log-probabilities of the same tokens with the LoRA.
        base_served: The server's log-probabilities of the same tokens with the base model alone; `None` if the server
            did not compute them.
        dtype: Precision in which the server computes. The coarser precision of trainer and server sets the tolerance.

    Raises:
        AdapterRejected: The difference is larger than rounding explains; a server's number is not finite; or the LoRA
            changed a number far more than rounding does, but the server's numbers are nearly those of its base model
            (the LoRA is not applied).
    """
    if len(served) != len(probe.logprobs) or not all(math.isfinite(value) for value in served):
        raise AdapterRejected(f"{name}: the engine's log-probabilities are not finite. Drop this step.")
    most, mean = max(_TOLERANCE.get(kind, _TOLERANCE["bfloat16"]) for kind in (dtype, probe.dtype))
    gaps = _gaps(served, probe.logprobs)
    if base_served is not None:
        # A LoRA that is not applied can lie within the tolerance in bfloat16. This tells the two apart, but only where
        # the LoRA moves something by far more than rounding, as the trainer's own two numbers say.
        moved = _gaps(probe.logprobs, probe.base_logprobs)
        if max(moved) > 10 * most and max(_gaps(served, base_served)) < most / 10:
            raise AdapterRejected(
                f"{name}: it was loaded, and the engine answers as the base model does: the LoRA is not applied. "
                "Train it for the base that serves, on layers that the engine knows."
            )
    # The mean too: a wrong scaling moves every token a little, and rounding moves a few tokens far.
    if max(gaps) > most or sum(gaps) / len(gaps) > mean:
        raise AdapterRejected(
            f"{name}: the engine's log-probabilities are up to {max(gaps):.2g} nats from the trainer's "
            f"({most:g} are explained by {dtype}). It was trained on another base than serves, or with another scaling."
        )
    return max(gaps)


def _gaps(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    return [abs(one - other) for one, other in zip(ones, others, strict=True)]
