"""One GRPO update: base model + parent's LoRA + scored rows -> a new, published LoRA.

Reads like the loop it is: load, draw minibatches, forward, loss, backward, clip, step; then save to a temporary
directory and publish by rename. Anything not finite stops the update; nothing is published then.
"""

from __future__ import annotations

import math
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch  # with transformers it takes seconds: import this module only to train

from art_patch.errors import TrainingError
from art_patch.records import Trajectory
from art_patch.serving.adapters import publish_adapter
from art_patch.serving.canary import ENTRY, Canary
from art_patch.training.advantages import Sample
from art_patch.training.canary import canary_of
from art_patch.training.config import TrainConfig
from art_patch.training.logprobs import TrainRow, micro_batches, score_rows
from art_patch.training.loss import LossInput, policy_loss
from art_patch.training.rows import rows_of, total_sampled


@dataclass(frozen=True, slots=True)
class UpdateMetrics:
    """What an update did.

    Attributes:
        trajectories: trained on (advantage not zero).
        rows: token sequences they became; more rows than trajectories means that histories forked.
        tokens: sampled tokens trained, once an epoch.
        steps: optimizer steps.
        loss: mean over all steps.
        kl_nats: k3 estimate of KL(behaviour || trained) a token, in the last epoch.
        clip_fraction: share of tokens whose gradient the clip stopped.
        entropy_nats: mean over trained tokens, in the last epoch.
        grad_norm: mean before clipping.
        logprob_gap_nats: largest difference between recorded and own log-probability before the first step, over
            tokens that the parent sampled; tells whether trainer and server compute the same thing.
    """

    trajectories: int
    rows: int
    tokens: int
    steps: int
    loss: float
    kl_nats: float
    clip_fraction: float
    entropy_nats: float
    grad_norm: float
    logprob_gap_nats: float


def update(
    samples: Sequence[Sample],
    *,
    base: str,
    base_sha256: str,
    parent: Path | None,
    target: Path,
    config: TrainConfig,
    on_policy: Callable[[Trajectory], bool] = lambda _: True,
    progress: Callable[[int, int, float], None] | None = None,
) -> UpdateMetrics:
    """Train and publish one policy.

    Args:
        samples: trajectories with their advantages; those with advantage 0 cost nothing.
        base: model directory or hub id.
        base_sha256: the base's fingerprint, for the manifest.
        parent: adapter directory of the policy to continue from; `None` starts a new LoRA.
        target: where to publish, `adapters/NAME@STEP`.
        config: how.
        on_policy: whether the parent sampled this trajectory; only those enter `logprob_gap_nats`.
        progress: called with `(optimizer steps done, total, loss)`.

    Raises:
        TrainingError: if there is nothing to train on, or a loss or gradient is not finite.
        AdapterRejected: if the target exists.
    """
    rows: list[TrainRow] = []
    own: list[TrainRow] = []
    trained = 0
    for sample in samples:
        if sample.advantage == 0.0:
            continue
        its = [TrainRow(row, sample.advantage) for row in rows_of(sample.trajectory, max_tokens=config.max_tokens)]
        trained += bool(its)
        rows += its
        own += its if on_policy(sample.trajectory) else []
    tokens = total_sampled([item.row for item in rows])
    if not tokens:
        raise TrainingError("no recorded token has an advantage: every group was scored alike, or none is trainable")
    model, device = load_policy(base, parent, config)
    gap = _gap(model, own, config, device)
    tally = _train(model, rows, config, device, progress)
    canary = canary_of(model, rows, device)
    _publish(model, target, canary, base_sha256=base_sha256, config=config, base=base)
    steps = config.epochs * len(_cut(rows, config.minibatches))
    return UpdateMetrics(
        trajectories=trained,
        rows=len(rows),
        tokens=tokens,
        steps=steps,
        loss=tally.loss / steps,
        kl_nats=tally.kl_nats / tokens,
        clip_fraction=tally.clipped / (tokens * config.epochs),
        entropy_nats=tally.entropy_nats / tokens,
        grad_norm=tally.grad_norm / steps,
        logprob_gap_nats=gap,
    )


def load_policy(base: str, parent: Path | None, config: TrainConfig) -> tuple[Any, torch.device]:
    """Return the base model with the parent's LoRA (or a new one), ready to train, and its device.

    Dropout is off: with it the first step's ratios would not be 1.
    """
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # the cycle shows its own
    # peft 0.21 asks transformers 5.23 by the old name
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(config.seed)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    if parent is not None:
        model = PeftModel.from_pretrained(model, str(parent), is_trainable=True, autocast_adapter_dtype=True)
    else:
        # Every linear layer of the blocks by name: "all-linear" is not a name an engine could check.
        lora = LoraConfig(
            r=config.lora_rank, lora_alpha=config.lora_alpha, lora_dropout=0.0, target_modules=linear_names(model),
            task_type="CAUSAL_LM",
        )  # fmt: skip
        model = get_peft_model(model, lora)
    model.to(device)
    model.eval()
    return model, device


def linear_names(model: Any) -> list[str]:
    """Return the last part of the name of every linear layer in the blocks, language head left out."""
    head = model.get_output_embeddings()
    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
    return sorted(names)


@dataclass(slots=True)
class _Tally:
    loss: float = 0.0
    kl_nats: float = 0.0
    clipped: int = 0
    entropy_nats: float = 0.0
    grad_norm: float = 0.0


def _train(
    model: Any,
    rows: Sequence[TrainRow],
    config: TrainConfig,
    device: torch.device,
    progress: Callable[[int, int, float], None] | None,
) -> _Tally:
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    order = random.Random(config.seed)
    tally = _Tally()
    done, total = 0, config.epochs * len(_cut(rows, config.minibatches))
    for epoch in range(config.epochs):
        if epoch == config.epochs - 1:
            tally.kl_nats = tally.entropy_nats = 0.0
        for minibatch in _cut(order.sample(rows, len(rows)), config.minibatches):
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * min(1.0, (done + 1) / (config.warmup_steps + 1))
            loss = _step(model, minibatch, config, device, tally)
            norm = float(torch.nn.utils.clip_grad_norm_(weights, config.max_grad_norm))
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise TrainingError(
                    f"loss {loss} and gradient norm {norm} at step {done + 1} of {total}: the update was dropped; "
                    "lower --learning-rate, or look for absurd rewards"
                )
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            done += 1
            tally.loss += loss
            tally.grad_norm += norm
            if progress is not None:
                progress(done, total, loss)
    return tally


def _step(model: Any, minibatch: Sequence[TrainRow], config: TrainConfig, device: torch.device, tally: _Tally) -> float:
    """Accumulate the gradient of one optimizer step; micro-batches change memory, not the result."""
    tokens = total_sampled([item.row for item in minibatch])
    total = 0.0
    for batch in micro_batches(minibatch, config.micro_batch_tokens):
        scored = score_rows(model, batch, device)
        trained_B = torch.tensor([sum(item.row.sampled_T[1:]) for item in batch])
        loss, metrics = policy_loss(
            LossInput(
                logprob_N=scored.logprob_N,
                old_N=scored.recorded_N,
                recorded_N=scored.recorded_N,
                advantage_N=scored.advantage_N,
                trajectory_N=torch.arange(len(batch)).repeat_interleave(trained_B).to(device),
                tokens_in_step=tokens,
                trajectories_in_step=len(minibatch),
            ),
            config.loss,
        )
        loss.backward()
        total += loss.item()
        tally.kl_nats += metrics.kl_nats
        tally.clipped += metrics.clipped_low + metrics.clipped_high
        tally.entropy_nats += scored.entropy_N.sum().item()
    return total


def _gap(model: Any, rows: Sequence[TrainRow], config: TrainConfig, device: torch.device) -> float:
    gap = 0.0
    with torch.no_grad():
        for batch in micro_batches(rows, config.micro_batch_tokens):
            scored = score_rows(model, batch, device)
            gap = max(gap, (scored.logprob_N - scored.recorded_N).abs().max().item())
    return gap


def _cut(rows: Sequence[TrainRow], parts: int) -> list[Sequence[TrainRow]]:
    parts = min(parts, len(rows))
    edges = [round(i * len(rows) / parts) for i in range(parts + 1)]
    return [rows[a:b] for a, b in pairwise(edges)]


def _publish(model: Any, target: Path, canary: Canary, *, base_sha256: str, config: TrainConfig, base: str) -> None:
    for name, weight in model.named_parameters():
        if weight.requires_grad and not bool(torch.isfinite(weight).all()):
            raise TrainingError(
                f"{name} is not finite after the last step; lower --learning-rate. Nothing was published"
            )
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    directory = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        model.save_pretrained(directory, safe_serialization=True)
        extra = {"base": base, "config": asdict(config), ENTRY: canary.entry()}
        publish_adapter(directory, target, base_sha256=base_sha256, extra=extra)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def stale_directories(adapters: Path) -> Iterator[Path]:
    """Yield what an update that was killed left behind: never published, so safe to delete."""
    yield from adapters.glob(".*@*.*")
