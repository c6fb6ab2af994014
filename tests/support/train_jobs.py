"""Jobs for tests of the trainer: a tiny base, runs it sampled itself, and what a plain forward says of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from art_patch.policies import base_fingerprint, load_model
from art_patch.training import Example, Row, Sibling, TrainConfig, TrainGroup, TrainJob
from art_patch.training.data.rows import Turn, merge
from art_patch.training.loop.loading import load_policy
from tests.support.families import logits_of

SMALL = TrainConfig(
    learning_rate=5e-3, epochs=1, minibatches=1, lora_rank=4, warmup_steps=0,
    max_drift_nats=None, max_gap_nats=None, max_kl_nats=None, max_clip_fraction=None,
)  # fmt: skip
"""One step, without bounds: this rate moves a random model far."""


def row(prompt: Sequence[int], answer: Sequence[int], *, temperature: float = 1.0, logprob: float = -1.0) -> Row:
    """One turn."""
    given, said = len(prompt), len(answer)
    return Row(
        (*prompt, *answer),
        (False,) * given + (True,) * said,
        (0.0,) * given + (logprob,) * said,
        (1.0,) * given + (temperature,) * said,
    )


def plain_logprobs(model: Any, row: Row) -> list[float]:
    """The plain way: all logits of one row by transformers alone."""
    with torch.no_grad():
        logits = logits_of(model, torch.tensor([row.ids_T]))[0].double()
    return [
        torch.log_softmax(logits[t - 1] / row.temperature_T[t], -1)[row.ids_T[t]].item()
        for t in range(1, len(row.ids_T))
        if row.sampled_T[t]
    ]


def as_sampled(model: Any, row: Row) -> Row:
    """The row with the model's own log-probabilities, as the engine would have recorded them."""
    known = iter(plain_logprobs(model, row))
    return replace(row, logprobs_T=tuple(next(known) if sampled else 0.0 for sampled in row.sampled_T))


def plain_model(base: Path, adapter: Path | None = None) -> Any:
    """By transformers and peft alone."""
    from peft import PeftModel

    model = load_model(base, dtype=torch.float32)
    return (model if adapter is None else PeftModel.from_pretrained(model, str(adapter))).eval()


def trainable(base: Path, config: TrainConfig = SMALL) -> Any:
    """A model of `load_policy` in fp64 whose LoRA does something, so that every weight has a gradient."""
    model = load_policy(str(base), None, config).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(0.05 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
    return model


def random_groups(base: Path, *, groups: int, siblings: int, seed: int = 0) -> tuple[TrainGroup, ...]:
    """Groups of two-turn runs with a prompt in common, as the base would have sampled them."""
    rng, model = random.Random(seed), plain_model(base)
    made: list[TrainGroup] = []

    def some(number: int) -> tuple[int, ...]:
        return tuple(rng.randrange(320) for _ in range(number))

    for group in range(groups):
        prompt = some(rng.randint(2, 9))
        rewards = np.array([rng.random() for _ in range(siblings)])
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        members: list[Sibling] = []
        for number, advantage in enumerate(advantages.tolist()):
            said = Turn(tuple(prompt), some(rng.randint(1, 5)), (), rng.choice([1.0, 0.7]))
            more = Turn((*prompt, *said.answer_ids_A, *some(rng.randint(1, 4))), some(3), ())
            (whole,) = merge(replace(turn, logprobs_A=(-1.0,) * len(turn.answer_ids_A)) for turn in (said, more))
            members.append(Sibling(f"t{group}-{number}", Example((as_sampled(model, whole),), advantage), True))
        made.append(TrainGroup(f"g{group}", tuple(members)))
    return tuple(made)


def make_job(base: Path, target: Path, groups: Sequence[TrainGroup], **changes: Any) -> TrainJob:
    """A job; `changes` of the config's fields, or of its own."""
    fields = ("parent", "champion", "demonstrations", "rehearsal", "pairs", "evaluation", "mean_reward")
    own = {name: changes.pop(name) for name in fields if name in changes}
    return TrainJob(
        base=str(base),
        base_sha256=base_fingerprint(base),
        target=target,
        config=replace(SMALL, **changes),
        groups=tuple(groups),
        **({"parent": None} | own),
    )


def weights_of(adapter: Path) -> dict[str, torch.Tensor]:
    """What was published."""
    return load_file(adapter / "adapter_model.safetensors")
