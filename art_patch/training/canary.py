"""What the new policy computes for a few tokens, for servers to compare with (`art_patch.serving.canary`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from art_patch.errors import TrainingError
from art_patch.serving.canary import Canary
from art_patch.training.logprobs import TrainRow

_TOKENS = 48


def canary_of(model: Any, rows: Sequence[TrainRow], device: torch.device) -> Canary:
    """Return the log-probabilities, at temperature 1, of the likeliest tokens at the end of the shortest row.

    Args:
        model: the trained peft model.
        rows: what it was trained on; at least one.
        device: where the model is.

    Raises:
        TrainingError: if one is not finite.
    """
    row = min((item.row for item in rows), key=lambda row: len(row.ids_T))
    last = max(place for place, sampled in enumerate(row.sampled_T) if sampled) + 1
    ids_T = row.ids_T[max(0, last - _TOKENS) : last]
    with torch.no_grad():
        tuned_TV = _logprobs_TV(model, ids_T, device)
        with model.disable_adapter():
            base_TV = _logprobs_TV(model, ids_T, device)
    targets_T1 = tuned_TV.argmax(dim=-1, keepdim=True)
    tuned, base = (tuple(each.gather(1, targets_T1).squeeze(1).tolist()) for each in (tuned_TV, base_TV))
    if not all(map(math.isfinite, tuned)):
        raise TrainingError("the trained policy's log-probabilities are not finite; lower --learning-rate")
    return Canary(ids_T, tuned, base, str(model.dtype).removeprefix("torch."), tuple(targets_T1.squeeze(1).tolist()))


def _logprobs_TV(model: Any, ids_T: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """After each token but the last."""
    ids_1T = torch.tensor([ids_T], device=device)
    return torch.log_softmax(model(input_ids=ids_1T, use_cache=False).logits[0, :-1].float(), dim=-1)
