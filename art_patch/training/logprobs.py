"""Log-probabilities of recorded tokens under a model, with logits computed only where something was sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from art_patch.training.rows import Row


@dataclass(frozen=True, slots=True)
class TrainRow:
    """A row with the advantage of its trajectory."""

    row: Row
    advantage: float


def micro_batches(rows: Sequence[TrainRow], tokens: int) -> Iterator[list[TrainRow]]:
    """Cut rows into batches of at most `tokens` tokens each, padding included; rows of like length together."""
    batch: list[TrainRow] = []
    for item in sorted(rows, key=lambda r: len(r.row.ids_T)):
        if batch and len(item.row.ids_T) * (len(batch) + 1) > tokens:  # sorted, so this one is the longest
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class Scored:
    """N sampled tokens of a micro-batch, flat; see `LossInput` for the first three."""

    logprob_N: Tensor
    recorded_N: Tensor
    advantage_N: Tensor
    entropy_N: Tensor


def score_rows(model: Any, batch: Sequence[TrainRow], device: torch.device) -> Scored:
    """Return the log-probability of every sampled token of `batch` under `model`.

    Args:
        model: a causal language model of transformers, or one wrapped by peft.
        batch: B rows, padded here on the right to the longest, T.
        device: where the model is.

    Token t is predicted by the logits at t - 1. The language head runs only at positions from which some row predicts
    a sampled token (`logits_to_keep`), which is exact for every architecture, soft-capped logits included.
    """
    length_T = max(len(item.row.ids_T) for item in batch)
    ids_BT = torch.zeros((len(batch), length_T), dtype=torch.long)
    mask_BT = torch.zeros_like(ids_BT)
    sampled_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    recorded_BT = torch.zeros((len(batch), length_T))
    temperature_BT = torch.ones((len(batch), length_T))
    advantage_B = torch.tensor([item.advantage for item in batch])
    for b, item in enumerate(batch):
        n = len(item.row.ids_T)
        ids_BT[b, :n] = torch.tensor(item.row.ids_T)
        mask_BT[b, :n] = 1
        sampled_BT[b, :n] = torch.tensor(item.row.sampled_T)
        recorded_BT[b, :n] = torch.tensor(item.row.logprobs_T)
        temperature_BT[b, :n] = torch.tensor(item.row.temperature_T)
    targets_BT = sampled_BT[:, 1:]  # a sequence's first token has no prediction
    keep_K = targets_BT.any(dim=0).nonzero().squeeze(1)
    output = model(
        input_ids=ids_BT.to(device),
        attention_mask=mask_BT.to(device),
        logits_to_keep=keep_K.to(device),
        use_cache=False,
    )
    chosen_BK = targets_BT[:, keep_K]
    logits_NV = (
        _at_least_fp32(output.logits[chosen_BK.to(device)])
        / temperature_BT[:, 1:][:, keep_K][chosen_BK].to(device)[:, None]
    )
    target_N = ids_BT[:, 1:][:, keep_K][chosen_BK].to(device)
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    with torch.no_grad():
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(dim=-1)
    return Scored(
        logprob_N=logprobs_NV.gather(1, target_N[:, None]).squeeze(1),
        recorded_N=recorded_BT[:, 1:][:, keep_K][chosen_BK].to(device),
        advantage_N=advantage_B[:, None].expand(-1, len(keep_K))[chosen_BK].to(device),
        entropy_N=entropy_N,
    )


def _at_least_fp32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
