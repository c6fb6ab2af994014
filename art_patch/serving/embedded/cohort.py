"""A batch of rows of one policy that decode in step, with their shared key/value cache.

Rows are padded on the left, so the newest position is the last column for all of them. A cohort starts with one forward
over its prompts (`prefill`; equal prompts are computed once and their cache copied), then every `advance` feeds the
tokens just sampled and leaves the next logits. `keep` drops rows that ended, `merge` takes in a younger cohort, so that
one forward a step serves everybody on the policy.

Owned by the scheduler thread. Touches no policy switch: the caller activates the LoRA before prefill and advance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers.cache_utils import DynamicCache, DynamicLayer

from art_patch.serving.embedded.generation import Row
from art_patch.serving.embedded.sampling import Sampler

_SPARE_COLUMNS = 64
_FREE_PADDING = 4096  # tokens of padding that cost less than another forward


class Cohort:
    """Rows, their cache and the logits of their next token."""

    def __init__(self, policy: Any, rows: list[Row]) -> None:
        self.policy = policy
        self.rows = rows
        self.logits_BV: torch.Tensor
        self.sampler: Sampler
        self.width = 0
        self._cache: DynamicCache
        self._mask_BW: torch.Tensor  # ones beyond `width`, so that a step only takes a longer slice
        self._lengths_B1: torch.Tensor  # true length of each row, which is its next position

    def prefill(self, model: Any) -> None:
        """Runs the prompts through the model."""
        prompts = [row.generation.prompt_ids for row in self.rows]
        first: dict[tuple[int, ...], int] = {}
        source = [first.setdefault(tuple(prompt), len(first)) for prompt in prompts]
        unique = list(first)
        self.width = max(map(len, unique))
        ids_UW = torch.tensor([(0,) * (self.width - len(p)) + p for p in unique], device=model.device)
        lengths_U1 = torch.tensor([[len(p)] for p in unique], device=model.device)
        positions_UW = torch.arange(self.width, device=model.device) - self.width + lengths_U1
        mask_UW = (positions_UW >= 0).long()
        self._cache = DynamicCache(config=model.config)
        self._lengths_B1, self._mask_BW = lengths_U1, mask_UW
        self.logits_BV = self._forward(model, ids_UW, positions_UW.clamp_min_(0))
        if len(unique) < len(prompts):
            self._select(torch.tensor(source, device=model.device))
        self._changed()

    def advance(self, model: Any, token_ids: Sequence[int]) -> None:
        """Feeds one token a row and computes the logits of the next.

        Args:
            model: The causal language model, policy active.
            token_ids: What was sampled from `logits_BV`, in row order.
        """
        ids_B1 = torch.tensor(token_ids, device=model.device).unsqueeze(1)
        self.width += 1
        if self.width > self._mask_BW.shape[1]:
            self._mask_BW = functional.pad(self._mask_BW, (0, _SPARE_COLUMNS), value=1)
        self.logits_BV = self._forward(model, ids_B1, self._lengths_B1)
        self._lengths_B1 = self._lengths_B1 + 1

    def keep(self, alive: Sequence[int]) -> None:
        """Drops all rows but these, and the padding nobody needs any more."""
        self._select(torch.tensor(alive, device=self._mask_BW.device))
        self.rows = [self.rows[index] for index in alive]
        if self._plain:
            longest = int(self._lengths_B1.max())
            if surplus := self.width - longest:
                self._mask_BW = self._mask_BW[:, surplus:]
                self.width = longest
                for layer in self._layers:
                    layer.keys, layer.values = layer.keys[..., surplus:, :], layer.values[..., surplus:, :]
        self._changed()

    def can_merge(self, other: Cohort) -> bool:
        """Whether one padded batch costs less than two."""
        if self.policy is not other.policy or not (self._plain and other._plain):
            return False
        apart = len(self.rows) * self.width + len(other.rows) * other.width
        together = (len(self.rows) + len(other.rows)) * max(self.width, other.width)
        return together <= 1.25 * apart + _FREE_PADDING

    def merge(self, other: Cohort) -> None:
        """Takes in the rows of another cohort of the same policy that waits at the same point, logits computed."""
        width = max(self.width, other.width)
        for mine, theirs in zip(self._layers, other._layers, strict=True):
            mine.keys = torch.cat([_pad_keys(mine.keys, width), _pad_keys(theirs.keys, width)])
            mine.values = torch.cat([_pad_keys(mine.values, width), _pad_keys(theirs.values, width)])
        masks = [functional.pad(c._mask_BW[:, : c.width], (width - c.width, 0)) for c in (self, other)]
        self._mask_BW = torch.cat(masks)
        self._lengths_B1 = torch.cat([self._lengths_B1, other._lengths_B1])
        self.logits_BV = torch.cat([self.logits_BV, other.logits_BV])
        self.rows = self.rows + other.rows
        self.width = width
        self._changed()

    @property
    def _layers(self) -> list[Any]:
        return self._cache.layers

    @property
    def _plain(self) -> bool:
        # Sliding windows and recurrent states cannot be shifted; such models keep their cohorts apart.
        return all(type(layer) is DynamicLayer for layer in self._layers)

    def _forward(self, model: Any, ids_BT: torch.Tensor, positions_BT: torch.Tensor) -> torch.Tensor:
        output = model(
            input_ids=ids_BT,
            attention_mask=self._mask_BW[:, : self.width],
            position_ids=positions_BT,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _select(self, indices_R: torch.Tensor) -> None:
        cache: Any = self._cache  # its annotation asks for LongTensor, a class no function returns
        cache.reorder_cache(indices_R)
        self._mask_BW = self._mask_BW[indices_R]
        self._lengths_B1 = self._lengths_B1[indices_R]
        self.logits_BV = self.logits_BV[indices_R]

    def _changed(self) -> None:
        params = [row.generation.params for row in self.rows]
        self.sampler = Sampler(params, [row.noise for row in self.rows], self.logits_BV.device)


def _pad_keys(tensor_BHWD: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - tensor_BHWD.shape[-2]
    return functional.pad(tensor_BHWD, (0, 0, missing, 0)) if missing else tensor_BHWD
