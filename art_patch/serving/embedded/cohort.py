"""A batch of rows of one policy that are decoded together, one token per row at a time, with one key/value cache.

A row is one choice of a request. The scheduler's thread owns the cohort. That thread must activate the policy's LoRA
before `prefill` and `advance`, because the cohort does not do it.

Tensor axes: B rows, C rows with a top_p cut, U different prompts, R rows to select, H attention heads, V vocabulary, W
cached positions (columns, padding included), K bytes of a mask, T positions of one forward pass, D size of a head.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers.cache_utils import DynamicCache, DynamicLayer

from art_patch.serving.embedded.generation import Row, SamplingParams


class Sampler:
    """Samples tokens for a batch, whose settings it holds as tensors; rebuilt whenever rows join or leave."""

    def __init__(self, params: Sequence[SamplingParams], noises: Sequence[Any], device: torch.device) -> None:
        temperatures = [1.0 if p.greedy else p.temperature for p in params]
        greedy = [p.greedy for p in params]
        self._temperature_B1 = _column(temperatures, device) if any(t != 1.0 for t in temperatures) else None
        self._all_greedy = all(greedy)
        self._greedy_B = torch.tensor(greedy, device=device) if any(greedy) and not self._all_greedy else None
        cut = {row: p.top_p for row, p in enumerate(params) if not p.greedy and p.top_p < 1.0}
        self._cut = (torch.tensor([*cut], device=device), _column([*cut.values()], device)) if cut else None
        # A row with a seed draws from a generator of its own, so its tokens do not depend on its neighbours.
        self._seeded = [(i, noise) for i, noise in enumerate(noises) if noise is not None and not greedy[i]]

    def sample(
        self, logits_BV: torch.Tensor, masks: Mapping[int, bytes] | None = None
    ) -> tuple[list[int], list[float]]:
        """Draws one token for each row; returns B token ids and their B log-probabilities, before any top_p cut.

        `masks` has a bit for each token that may come, of the rows that follow a grammar. Their log-probabilities are
        those among these tokens, and NaN where there is none.
        """
        # Before the softmax: in bfloat16 log-probabilities are too coarse for the trainer's importance ratios.
        logits_BV = logits_BV.float()
        if masks:
            logits_BV = _masked(logits_BV, masks)
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
        if self._cut is not None:
            rows_C, top_p_C1 = self._cut
            probs_BV[rows_C] = _nucleus(probs_BV[rows_C], top_p_C1)
        # Dividing by exponential noise and taking the largest draws from the distribution (the Gumbel trick) for all
        # rows in one pass, whichever generator each row's noise comes from.
        noise_BV = torch.empty_like(probs_BV).exponential_()
        for row, noise in self._seeded:
            noise_BV[row].exponential_(generator=noise)
        return (probs_BV / noise_BV.clamp_min_(torch.finfo(noise_BV.dtype).tiny)).argmax(dim=-1)


def _masked(logits_BV: torch.Tensor, masks: Mapping[int, bytes]) -> torch.Tensor:
    device, size = logits_BV.device, logits_BV.shape[1]
    bytes_RK = torch.frombuffer(bytearray(b"".join(masks.values())), dtype=torch.uint8).view(len(masks), -1).to(device)
    bits_RV = ((bytes_RK.unsqueeze(2) >> torch.arange(8, device=device)) & 1).flatten(1)[:, :size]
    allowed_BV = torch.ones_like(logits_BV, dtype=torch.bool)
    # A model may have more logits than its tokenizer has tokens: these are never allowed.
    allowed_BV[[*masks]] = functional.pad(bits_RV, (0, size - bits_RV.shape[1])).bool()
    return logits_BV.masked_fill(~allowed_BV, float("-inf"))


def _nucleus(probs_CV: torch.Tensor, top_p_C1: torch.Tensor) -> torch.Tensor:
    """Zeroes all but the smallest set of likeliest tokens that reaches top_p; the rest is not renormalised."""
    sorted_CV, order_CV = probs_CV.sort(dim=-1, descending=True)
    before_CV = sorted_CV.cumsum(dim=-1) - sorted_CV
    # A token stays if the ones before it have not reached top_p yet, so the likeliest always stays.
    sorted_CV = sorted_CV.masked_fill(before_CV >= top_p_C1, 0.0)
    return torch.zeros_like(probs_CV).scatter_(1, order_CV, sorted_CV)


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)


_SPARE_COLUMNS = 64
_FREE_PADDING = 4096  # tokens of padding that cost less than another forward


class Cohort:
    """The rows of one policy that are decoded together, with their key/value cache and their next tokens' logits."""

    def __init__(self, policy: Any, rows: list[Row]) -> None:
        self.policy, self.rows = policy, rows
        self.logits_BV: torch.Tensor
        self.sampler: Sampler
        self.width = 0  # positions in the cache, padding included
        self._cache: DynamicCache
        self._cache_keyword: str
        self._mask_BW: torch.Tensor  # ones beyond `width`, so that a step only takes a longer slice
        self._lengths_B1: torch.Tensor  # true length of each row, which is its next position

    def prefill(self, model: Any) -> None:
        """Runs the model over the rows' prompts and stores the logits of each row's first token in `logits_BV`."""
        # The choices of one request, and siblings of one scenario, have equal prompts: each is computed once.
        prompts = [row.generation.prompt_ids for row in self.rows]
        first: dict[tuple[int, ...], int] = {}
        source = [first.setdefault(tuple(prompt), len(first)) for prompt in prompts]
        unique = list(first)
        self.width = max(map(len, unique))
        # Padded on the left, so that the newest position is the last column of every row.
        ids_UW = torch.tensor([(0,) * (self.width - len(p)) + p for p in unique], device=model.device)
        lengths_U1 = torch.tensor([[len(p)] for p in unique], device=model.device)
        positions_UW = torch.arange(self.width, device=model.device) - self.width + lengths_U1
        mask_UW = (positions_UW >= 0).long()
        self._cache = DynamicCache(config=model.config)
        self._cache_keyword = _cache_keyword(model)
        self._lengths_B1, self._mask_BW = lengths_U1, mask_UW
        # Padding has negative positions, which an embedding table cannot look up; the mask hides those columns anyway.
        self.logits_BV = self._forward(model, ids_UW, positions_UW.clamp_min_(0))
        if len(unique) < len(prompts):
            self._select(torch.tensor(source, device=model.device))
        self._changed()

    def advance(self, model: Any, token_ids: Sequence[int]) -> None:
        """Feeds one sampled token per row, in row order, and computes the logits of each row's next token."""
        ids_B1 = torch.tensor(token_ids, device=model.device).unsqueeze(1)
        self.width += 1
        # Grown by 64 columns at a time: a concatenation at every step would copy the mask of every row.
        if self.width > self._mask_BW.shape[1]:
            self._mask_BW = functional.pad(self._mask_BW, (0, _SPARE_COLUMNS), value=1)
        self.logits_BV = self._forward(model, ids_B1, self._lengths_B1)
        self._lengths_B1 = self._lengths_B1 + 1

    def keep(self, alive: Sequence[int]) -> None:
        """Drops all rows except those with the indices `alive`, and cache columns that only dropped rows used."""
        self._select(torch.tensor(alive, device=self._mask_BW.device))
        self.rows = [self.rows[index] for index in alive]
        # Columns that only dropped rows needed would be computed at every further step.
        if self._plain and (surplus := self.width - int(self._lengths_B1.max())):
            self._mask_BW = self._mask_BW[:, surplus:]
            self.width -= surplus
            for layer in self._layers:
                layer.keys, layer.values = layer.keys[..., surplus:, :], layer.values[..., surplus:, :]
        self._changed()

    def can_merge(self, other: "Cohort") -> bool:
        """Whether one padded batch of both cohorts costs less than two separate ones.

        False for different policies, and for a model whose cache cannot be shifted (sliding windows, recurrent states).
        """
        if self.policy is not other.policy or not (self._plain and other._plain):
            return False
        # Cells of key/value cache that one step reads, apart and together (padding included).
        apart = len(self.rows) * self.width + len(other.rows) * other.width
        together = (len(self.rows) + len(other.rows)) * max(self.width, other.width)
        return together <= 1.25 * apart + _FREE_PADDING

    def merge(self, other: "Cohort") -> None:
        """Adds the rows and the cache of another cohort of the same policy; both must have computed their logits."""
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
        mask_BW, cache = self._mask_BW[:, : self.width], {self._cache_keyword: self._cache}
        inputs = {"input_ids": ids_BT, "attention_mask": mask_BW, "position_ids": positions_BT}
        return model(**inputs, **cache, use_cache=True, logits_to_keep=1).logits[:, -1]

    def _select(self, indices_R: torch.Tensor) -> None:
        cache: Any = self._cache  # its annotation asks for LongTensor, a class no function returns
        cache.reorder_cache(indices_R)
        self._mask_BW = self._mask_BW[indices_R]
        self._lengths_B1 = self._lengths_B1[indices_R]
        self.logits_BV = self.logits_BV[indices_R]

    def _changed(self) -> None:
        params = [row.generation.params for row in self.rows]
        self.sampler = Sampler(params, [row.noise for row in self.rows], self.logits_BV.device)


def _cache_keyword(model: Any) -> str:
    # transformers 5.24 renamed it model by model, warns of the old name and drops it in 5.40. PEFT's wrapper takes
    # any keyword, so the model inside says which one it knows.
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "cache" if "cache" in inspect.signature(inner.forward).parameters else "past_key_values"


def _pad_keys(tensor_BHWD: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - tensor_BHWD.shape[-2]
    return functional.pad(tensor_BHWD, (0, 0, missing, 0)) if missing else tensor_BHWD
