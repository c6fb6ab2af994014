"""Forecasts, from a base's configuration alone, what fits on one card: serving, training, or both at the same time.

`step_bytes` is the largest memory of an update. Its formula follows the trainer: what each layer keeps until the
backward pass, the logits that `Scorer` holds at once, the LoRA with AdamW's moments, and the base's weights. On a CPU
it was compared with measured peaks (`tests/benchmarks/families_memory.py`). What is added for CUDA, and all of vLLM's
part, has not been compared with a real card yet: `UNTRIED` says so wherever numbers are shown.

`forecast` goes through the options that need less memory, the ones that cost least first, and returns the first that
fit. An update's longest row (`max_tokens`) is as important as `micro_batch_tokens`, because a row is never split.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from art_patch.doctor.base_shape import BaseShape, Layer
from art_patch.serving import LORAS_AT_ONCE, VllmOptions
from art_patch.training import TrainConfig

UNTRIED = "the formulas for GPUs have not been compared with a real card yet; leave some room"

GIB = 2**30
CHUNK_LOGITS = 1 << 25  # of `training.scoring`, which imports torch
RANK = TrainConfig().lora_rank
MAX_RANK = VllmOptions(Path(), Path(), "").max_lora_rank
_PACKED = {4: 0.5 + 2 / 64, 8: 1.0 + 2 / 64}  # bytes of a packed weight: its code, and the float16 scale of each 64
_TOKENS = tuple(TrainConfig().max_tokens >> half for half in range(6))  # of the longest row
_FLOORS = (4_096, 1_024)  # first with rows of at least so many tokens, whatever the bits; then with shorter ones
_BITS = (16, 8, 4)
_CONTEXTS = (131_072, 65_536, 32_768, 16_384, 8_192, 4_096, 2_048)
# For CUDA's own context, cuBLAS, and what an allocator cannot use. Untried.
_CUDA_BYTES, _FRAGMENTED = 0.8 * GIB, 1.05
# Code of torch's kernels for CPUs, which the first step loads, and memory of their threads: a step of 256 tokens with
# matrices of 256 x 256 left 20 MiB in float32 and 27 MiB in bfloat16.
_CPU_BYTES = 24 * 2**20
_READ_AHEAD = 1 << 16  # bytes of a file that Linux maps around the one that is read
# vLLM by default: the share of the card that it takes, tokens of a step, sequences at once; and its CUDA graphs.
_SHARE, _STEP_TOKENS, _SEQUENCES, _GRAPHS_BYTES = 0.9, 8_192, 256, 1.0 * GIB


@dataclass(frozen=True, slots=True)
class Update:
    """What the memory of an update depends on, besides the base."""

    tokens: int  # distinct tokens computed at once
    predicted: int  # of these, places from which a sampled token is predicted
    bits: int = 16  # `TrainConfig.base_bits`
    float_bytes: int = 2  # of a number in the precision of the model
    rank: int = RANK
    recompute: bool = True  # `TrainConfig.gradient_checkpointing`
    cuda: bool = True


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether something fits on the card, and with which options."""

    fits: bool
    needs_gib: float  # with these options; if it does not fit, the least that is needed
    options: dict[str, str]  # command -> its options; none where the defaults fit
    context: int | None = None  # most tokens of prompt and answer that can be served


@dataclass(frozen=True, slots=True)
class Forecast:
    """What fits on one card."""

    serve: Fit
    train: Fit
    both: Fit  # at the same time


def step_bytes(shape: BaseShape, update: Update) -> float:
    """Returns the largest memory of an update: while its base is loaded, or within one of its steps."""
    size = update.float_bytes
    packed = _PACKED.get(update.bits, float(size))
    matrix = max(rows * columns for layer in shape.layers for rows, columns in layer.adapted)
    base = (shape.weights - shape.adapted) * size + shape.adapted * packed
    loading = base + (matrix * shape.checkpoint_bytes if update.bits < 16 else 0)
    if not update.cuda and shape.checkpoint_bytes == size:  # weights are the file itself, mapped into memory
        unread = max(0, shape.looked_up * size - update.tokens * _READ_AHEAD)
        base, loading = base - unread, loading - unread
    elif not update.cuda and update.bits == 16:
        loading += shape.weights * shape.checkpoint_bytes  # the file is in memory until all is converted
    lora = 16 * shape.lora(update.rank)  # float32: weights, gradients, two moments
    kept = [_kept(layer, update, last=layer is shape.layers[-1]) for layer in shape.layers]
    if update.recompute:
        inputs = len(kept) * update.tokens * shape.width * size
        held, layer = inputs, max(kept)
    else:
        held, layer = sum(kept), 0.0
    held += 2 * update.tokens * shape.width * (size + 4)  # the embedded tokens and the last hidden states
    logits = 3 * 4 * min(update.predicted * shape.vocabulary, CHUNK_LOGITS)  # with the softmax and its logarithm
    backward = layer + max(_transient(each, update) for each in shape.layers)
    if update.bits < 16:
        backward += 2 * matrix * size  # a matrix that was unpacked, and its copy
    step = lora + held + max(logits, backward)
    if update.cuda:
        return max(loading, base + step) * _FRAGMENTED + _CUDA_BYTES
    return max(loading, base + step) + _CPU_BYTES


def _kept(layer: Layer, update: Update, *, last: bool) -> float:
    size, mlp = update.float_bytes, 4 * layer.mlp
    token = (layer.kept - mlp) * size + layer.kept_fp32 * 4 + 7 * update.rank * size
    # Behind the last attention only the places are computed from which a token is predicted.
    places = update.predicted if last else update.tokens
    return update.tokens * token + places * mlp * size


def _transient(layer: Layer, update: Update) -> float:
    mlp = 3 * layer.mlp * update.float_bytes
    # A CPU computes attention in float32: its inputs and the gradients of these.
    attention = (2 if update.cuda else 8) * layer.attention
    return update.tokens * max(mlp, attention)


def serving_bytes(shape: BaseShape, context: int) -> float:
    """Returns the memory that vLLM needs to answer one request of `context` tokens, in 16 bits."""
    loras = 2 * shape.lora(MAX_RANK) * LORAS_AT_ONCE
    widest = max(layer.mlp for layer in shape.layers)
    work = 2 * _STEP_TOKENS * (4 * shape.width + 3 * widest) + 8 * _SEQUENCES * shape.vocabulary
    cache = 2 * context * sum(layer.cached for layer in shape.layers)
    return 2 * shape.weights + loras + work + cache + _GRAPHS_BYTES + _CUDA_BYTES


def forecast(shape: BaseShape, gpu_gib: float) -> Forecast:
    """Returns what fits on one card of `gpu_gib` GiB, and the first options that make it fit."""
    card = gpu_gib * GIB
    contexts = [shape.context, *(each for each in _CONTEXTS if each < shape.context)]
    return Forecast(_serve(shape, card, contexts), _train(shape, card), _both(shape, card, contexts))


def _serve(shape: BaseShape, card: float, contexts: list[int]) -> Fit:
    for context in contexts:
        needs = serving_bytes(shape, context)
        if needs <= card * _SHARE:
            return Fit(True, needs / GIB, _serve_options(shape, context), context)
    return Fit(False, serving_bytes(shape, contexts[-1]) / GIB, {})


def _serve_options(shape: BaseShape, context: int, share: float | None = None) -> dict[str, str]:
    said = [] if context == shape.context else [f"--max-model-len {context}"]
    said += [] if share is None else [f"--gpu-memory-utilization {share:.2f}"]
    return {"serve": " ".join(said)} if said else {}


def _updates(most: int) -> Iterator[Update]:
    for floor in _FLOORS:
        for bits in _BITS:
            for tokens in (each for each in _TOKENS if floor <= each <= max(most, floor)):
                yield Update(tokens, tokens, bits)


def _train(shape: BaseShape, card: float) -> Fit:
    for update in _updates(_TOKENS[0]):
        needs = step_bytes(shape, update)
        if needs <= card:
            return Fit(True, needs / GIB, _train_options(update))
    least = min(step_bytes(shape, update) for update in _updates(_TOKENS[0]))
    return Fit(False, least / GIB, {})


def _train_options(update: Update) -> dict[str, str]:
    said = [] if update.bits == 16 else [f"--base-bits {update.bits}"]
    if update.tokens < _TOKENS[0]:
        said += [f"--micro-batch-tokens {update.tokens}", f"--max-tokens {update.tokens}"]
    return {"retrain": " ".join(said)} if said else {}


def _both(shape: BaseShape, card: float, contexts: list[int]) -> Fit:
    for context in (each for each in contexts if each <= _TOKENS[0]):
        served = serving_bytes(shape, context)
        # Rows are no longer than what the engine answers.
        for update in _updates(context):
            needs = served + step_bytes(shape, update)
            if needs <= card * 0.98:
                options = _serve_options(shape, context, min(0.95, served / card + 0.01)) | _train_options(update)
                return Fit(True, needs / GIB, options, context)
    least = serving_bytes(shape, contexts[-1]) + min(step_bytes(shape, each) for each in _updates(contexts[-1]))
    return Fit(False, least / GIB, {})
