"""Draws the next token of every row of a batch at once.

In: logits `[B, V]`. Out: ids and log-probabilities, both as lists of length B. The log-probability is that of the
distribution at the row's temperature before any top_p cut, `log_softmax(logits / T)`; of a greedy row it is
`log_softmax(logits)`. A row with a seed draws from its own generator, so its tokens do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from art_patch.serving.embedded.generation import SamplingParams


class Sampler:
    """The settings of a batch's rows as tensors; made again whenever the rows change."""

    def __init__(self, params: Sequence[SamplingParams], noises: Sequence[Any], device: torch.device) -> None:
        temperatures = [1.0 if p.greedy else p.temperature for p in params]
        greedy = [p.greedy for p in params]
        self._temperature_B1 = _column(temperatures, device) if any(t != 1.0 for t in temperatures) else None
        self._all_greedy = all(greedy)
        self._greedy_B = torch.tensor(greedy, device=device) if any(greedy) and not self._all_greedy else None
        cut = [not p.greedy and p.top_p < 1.0 for p in params]
        self._cut_rows = torch.tensor([i for i, c in enumerate(cut) if c], device=device) if any(cut) else None
        self._top_p_C1 = _column([p.top_p for p, c in zip(params, cut, strict=True) if c], device) if any(cut) else None
        self._seeded = [(i, noise) for i, noise in enumerate(noises) if noise is not None and not greedy[i]]

    def sample(self, logits_BV: torch.Tensor) -> tuple[list[int], list[float]]:
        """Draws one id a row; see the module for what the log-probabilities mean."""
        logits_BV = logits_BV.float()
        if self._temperature_B1 is not None:
            logits_BV = logits_BV / self._temperature_B1
        logprobs_BV = torch.log_softmax(logits_BV, dim=-1)
        if self._all_greedy:
            ids_B = logits_BV.argmax(dim=-1)
        else:
            ids_B = self._draw(logprobs_BV)
            if self._greedy_B is not None:
                ids_B = torch.where(self._greedy_B, logits_BV.argmax(dim=-1), ids_B)
        logprobs_B = logprobs_BV.gather(1, ids_B.unsqueeze(1)).squeeze(1)
        return ids_B.tolist(), logprobs_B.tolist()

    def _draw(self, logprobs_BV: torch.Tensor) -> torch.Tensor:
        probs_BV = logprobs_BV.exp()
        if self._cut_rows is not None and self._top_p_C1 is not None:
            probs_BV[self._cut_rows] = _nucleus(probs_BV[self._cut_rows], self._top_p_C1)
        # Dividing by exponential noise and taking the largest draws from the distribution (the Gumbel trick) for all
        # rows in one pass, whichever generator each row's noise comes from.
        noise_BV = torch.empty_like(probs_BV).exponential_()
        for row, noise in self._seeded:
            noise_BV[row].exponential_(generator=noise)
        return (probs_BV / noise_BV.clamp_min_(torch.finfo(noise_BV.dtype).tiny)).argmax(dim=-1)


def _nucleus(probs_CV: torch.Tensor, top_p_C1: torch.Tensor) -> torch.Tensor:
    """Zeroes all but the smallest set of likeliest tokens that reaches top_p. The draw needs no renormalising."""
    sorted_CV, order_CV = probs_CV.sort(dim=-1, descending=True)
    before_CV = sorted_CV.cumsum(dim=-1) - sorted_CV
    sorted_CV = sorted_CV.masked_fill(before_CV >= top_p_C1, 0.0)
    return torch.zeros_like(probs_CV).scatter_(1, order_CV, sorted_CV)


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)
