"""What the new policy computes for a few tokens, for servers to compare with (`art_patch.policies.probe`)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from art_patch.errors import TrainingError
from art_patch.policies import Probe
from art_patch.training.data.rows import Row
from art_patch.training.kernels.scoring import Scorer

_TOKENS = 48


def probe_of(model: Any, scorer: Scorer, rows: Iterable[Row]) -> Probe:
    """Return the log-probabilities, at temperature 1, of the likeliest tokens at the end of the shortest row.

    Args:
        model: the trained peft model.
        scorer: of the model.
        rows: what it was trained on; at least one.

    Raises:
        TrainingError: if one is not finite.
    """
    row = min(rows, key=lambda row: len(row.ids_T))
    last = max(place for place, sampled in enumerate(row.sampled_T) if sampled) + 1
    ids_T = row.ids_T[max(0, last - _TOKENS) : last]
    tuned_TV = scorer.next_TV(ids_T[:-1])
    with model.disable_adapter():
        base_TV = scorer.next_TV(ids_T[:-1])
    targets_T1 = tuned_TV.argmax(dim=-1, keepdim=True)
    tuned, base = (tuple(each.gather(1, targets_T1).squeeze(1).tolist()) for each in (tuned_TV, base_TV))
    if not all(map(math.isfinite, tuned)):
        raise TrainingError("the trained policy's log-probabilities are not finite; lower --learning-rate")
    return Probe(ids_T, tuned, base, str(model.dtype).removeprefix("torch."), tuple(targets_T1.squeeze(1).tolist()))
