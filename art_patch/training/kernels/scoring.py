"""What a model thinks of sampled tokens: a pack in, log-probabilities out.

`Scorer` computes every distinct token of a pack once. Whether a model can be asked that way is tried when it is loaded:
two rows that fork are scored both ways. A model that cannot (no attention, its own attention, tokens mixed elsewhere)
is asked row by row, which is always right and takes longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from art_patch.errors import TrainingError
from art_patch.training.data.packing import Example, Pack, packs_of
from art_patch.training.data.rows import Row
from art_patch.training.data.tree import Tree, tree_of
from art_patch.training.kernels import attention
from art_patch.training.kernels.attention import Forest, Unsupported
from art_patch.training.kernels.head import Head, logprobs
from art_patch.training.kernels.last_block import LastBlock

TOLERANCE_NATS = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Root mean square of what differs between the two ways that is rounding; of other precisions it is `_COARSE_NATS`."""

_COARSE_NATS = 0.1


@dataclass(frozen=True, slots=True)
class Scored:
    """Of the N sampled tokens of a pack.

    Attributes:
        logprob_N: at the temperature of each, with gradient.
        entropy_N: nats, of the distribution each was drawn from, without gradient.
        computed: tokens that went through the model.
    """

    logprob_N: Tensor
    entropy_N: Tensor
    computed: int


class Scorer:
    """A causal language model of transformers, with or without a LoRA of peft."""

    def __init__(self, model: Any, *, share: bool = True) -> None:
        """Prepare `model`: from now on it attends over trees if it can.

        Args:
            model: on its device.
            share: compute what rows have in common once; `False` is for comparisons.

        Raises:
            TrainingError: it is no causal language model.
        """
        self._causal = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._decoder = _decoder_of(self._causal)
        self._head = Head(self._causal)
        self._last_block: LastBlock | None = None
        self.why_apart: str | None = None if share else "not asked to share"
        if share:
            self._try()

    @property
    def shares(self) -> bool:
        """Whether each distinct token is computed once."""
        return self.why_apart is None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._causal.device

    @property
    def dtype(self) -> torch.dtype:
        """Of log-probabilities."""
        return torch.promote_types(self._causal.dtype, torch.float32)

    def score(self, pack: Pack) -> Scored:
        """Score a pack."""
        return self._together(pack) if self.shares else self._apart(pack)

    @torch.no_grad()
    def next_TV(self, ids_T: Sequence[int]) -> Tensor:
        """Return the log-probability, at temperature 1, of every token after each of these few tokens."""
        tree = tree_of([np.array(ids_T, dtype=np.int64)])
        return torch.log_softmax(self._head(self._hidden_PW(tree)), dim=-1)

    def _together(self, pack: Pack) -> Scored:
        at_Q = torch.from_numpy(pack.at_Q).to(self.device)
        hidden_PW = self._hidden_PW(pack.tree, torch.unique(at_Q))
        logprob_N, entropy_N = logprobs(self._head, hidden_PW[at_Q], *_asked(pack, self.device))
        return Scored(logprob_N, entropy_N, pack.tokens)

    def _hidden_PW(self, tree: Tree, at_Q: Tensor | None = None) -> Tensor:
        """Return the last hidden state of every place; where `at_Q` names some, only theirs need be right."""
        if self._last_block is not None:
            self._last_block.at_Q = at_Q
        depth_P = torch.from_numpy(tree.depth_P).to(self.device)
        hidden_1PW = self._decoder(
            input_ids=torch.from_numpy(tree.ids_P).to(self.device)[None],
            position_ids=depth_P[None],
            use_cache=False,
            **({"forest": Forest(tree.nodes, depth_P)} if self.shares else {}),
        ).last_hidden_state
        return hidden_1PW[0]

    def _apart(self, pack: Pack) -> Scored:
        """Each row by itself, so that nothing can be shared wrongly."""
        device = self._causal.device
        ids_P = torch.from_numpy(pack.tree.ids_P)
        hidden = {}
        computed = 0
        for where_T in pack.tree.where_R:
            states_1TW = self._decoder(input_ids=ids_P[where_T].to(device)[None], use_cache=False).last_hidden_state
            computed += len(where_T)
            hidden.update(zip(where_T.tolist(), states_1TW[0], strict=True))
        hidden_QW = torch.stack([hidden[place] for place in pack.at_Q.tolist()])
        logprob_N, entropy_N = logprobs(self._head, hidden_QW, *_asked(pack, device))
        return Scored(logprob_N, entropy_N, computed)

    def prove(self, examples: Sequence[Example]) -> None:
        """Try again on what will be scored, because a model may have a window that only long rows reach.

        Args:
            examples: the longest row of them is tried beside the one after it, which is a sibling's if there is one.
        """
        rows = [row for example in examples for row in example.rows]
        if not self.shares or not rows:
            return
        longest = max(range(len(rows)), key=lambda index: len(rows[index].ids_T))
        self._give_up_if_wrong(packs_of([Example(tuple(rows[longest : longest + 2]))], 1 << 62)[0])

    def _try(self) -> None:
        self._before = self._causal.config._attn_implementation
        attention.register()
        try:
            self._causal.set_attn_implementation(attention.NAME)
            self._last_block = LastBlock(self._decoder)
        except (AttributeError, ValueError) as error:
            self._give_up(f"{type(error).__name__}: {error}")
        else:
            self._give_up_if_wrong(_fork(self._head.vocabulary))

    @torch.no_grad()
    def _give_up_if_wrong(self, pack: Pack) -> None:
        try:
            together = self._together(pack).logprob_N
        except (Unsupported, TypeError, ValueError, AttributeError, RuntimeError) as error:
            self._give_up(f"{type(error).__name__}: {error}")
            return
        self._attend_by(self._before)
        difference = float((together - self._apart(pack).logprob_N).square().mean().sqrt())
        self._attend_by(attention.NAME)
        if not difference <= TOLERANCE_NATS.get(self._causal.dtype, _COARSE_NATS):
            self._give_up(f"sharing changed log-probabilities by {difference:.2g} nats")

    def _give_up(self, why: str) -> None:
        self.why_apart = why
        self._attend_by(self._before)

    def _attend_by(self, name: str) -> None:
        if self._last_block is not None:
            self._last_block.at_Q = None
        self._causal.set_attn_implementation(name)


def _decoder_of(causal: Any) -> Any:
    """What gives hidden states."""
    decoder = causal.get_decoder()
    if decoder is causal:  # transformers 5.23 looks for Llama 4's in the wrong place
        decoder = getattr(causal, "model", None)
    if decoder is None:
        raise TrainingError(f"{type(causal).__name__} has no decoder that transformers can tell: it cannot be trained")
    return decoder


def _asked(pack: Pack, device: torch.device) -> tuple[Tensor | None, Tensor, Tensor]:
    plain = bool((pack.temperature_Q == 1.0).all())
    return (
        None if plain else torch.from_numpy(pack.temperature_Q).to(device),
        torch.from_numpy(pack.place_N).to(device),
        torch.from_numpy(pack.target_N).to(device),
    )


def _fork(vocabulary: int) -> Pack:
    """Two rows that begin alike, and a third that does not."""

    def row(*ids: int) -> Row:
        kept = tuple(i % vocabulary for i in ids)
        return Row(kept, (False, *(True,) * (len(kept) - 1)), (0.0,) * len(kept), (1.0,) * len(kept))

    rows = (row(11, 12, 13, 14, 15, 16), row(11, 12, 13, 17, 18), row(19, 12, 13))
    return packs_of([Example(rows)], 1 << 20)[0]
