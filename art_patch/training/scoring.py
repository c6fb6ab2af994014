"""Computes log-probabilities of sampled tokens under a model: a pack in, tensors out.

A pack holds several rows (token sequences) with common beginnings, and `Scorer` computes each distinct token of it
once. Models that have no attention, use their own attention code, or mix tokens outside attention do not allow this. So
the constructor of `Scorer` scores a few small rows together and row by row, and compares the results. If they differ,
all packs of this model are computed row by row, which is correct for every model but slower.

With a vocabulary of 150,000, the logits of one long sequence need more memory than the model. So the language head is
computed only at the places (positions) from which a sampled token is predicted. It runs in chunks of bounded size, and
the logits of a chunk are computed again in the backward pass instead of being kept.

The suffix of a name gives the axes of a tensor: P distinct tokens of a pack, Q places from which sampled tokens are
predicted, N sampled tokens; T tokens of one row; W width of the hidden state, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from art_patch.training import attention
from art_patch.training.data.packing import Pack, Tree, packs_of, tree_of
from art_patch.training.data.rows import Example, Row
from art_patch.training.families import decoder_of

# Root mean square, in nats, by which the two ways of scoring may differ through rounding alone.
TOLERANCE_NATS = {torch.float64: 1e-6, torch.float32: 1e-3}
_COARSE_NATS = 0.1  # in other precisions

CHUNK_LOGITS = 1 << 25  # logits held at once: 128 MiB in fp32


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores of the N sampled tokens of a pack."""

    logprob_N: Tensor  # log-probability of each sampled token at its own sampling temperature, with gradient
    entropy_N: Tensor  # entropy in nats of the distribution from which each token was drawn, without gradient
    computed: int  # number of tokens that went through the model


class Scorer:
    """Scores packs with a causal language model of transformers, with or without a LoRA of peft."""

    def __init__(self, model: Any, *, share: bool = True) -> None:
        """Switches the model's attention to `tree_attention`, unless a comparison of scores shows that this is wrong.

        `model` is on its device; its attention implementation is changed in place. Without `share`, every sequence is
        computed by itself, for comparisons. Raises `TrainingError` if the model is not a causal language model.
        """
        self._causal = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._decoder = decoder_of(self._causal)
        self._head = Head(self._causal)
        self._last_block: LastBlock | None = None
        # Why rows (token sequences) are computed one by one; `None` if each distinct token of a pack is computed once.
        self.why_apart: str | None = None if share else "not asked to share"
        if share:
            self._try()

    @property
    def shares(self) -> bool:
        """Whether each distinct token of a pack is computed once; if false, rows are computed one by one."""
        return self.why_apart is None

    @property
    def device(self) -> torch.device:
        """The device on which the model computes, and on which returned tensors are."""
        return self._causal.device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the returned log-probabilities: the model's own, but at least float32."""
        return torch.promote_types(self._causal.dtype, torch.float32)

    def score(self, pack: Pack) -> Scored:
        """Computes log-probability and entropy of every sampled token of a pack (input of one forward pass)."""
        return self._together(pack) if self.shares else self._apart(pack)

    @torch.no_grad()
    def next_TV(self, ids_T: Sequence[int]) -> Tensor:
        """Returns log-probabilities (T, V) of each next token at temperature 1. T must be small: all are held."""
        tree = tree_of([np.array(ids_T, dtype=np.int64)])
        return torch.log_softmax(self._head(self._hidden_PW(tree)), dim=-1)

    def _together(self, pack: Pack) -> Scored:
        at_Q = torch.from_numpy(pack.at_Q).to(self.device)
        # Unique: a place stands among the Q once for each temperature, and `index_copy` wants each place once.
        hidden_PW = self._hidden_PW(pack.tree, torch.unique(at_Q))
        logprob_N, entropy_N = logprobs(self._head, hidden_PW[at_Q], *_asked(pack, self.device))
        return Scored(logprob_N, entropy_N, pack.tokens)

    def _hidden_PW(self, tree: Tree, at_Q: Tensor | None = None) -> Tensor:
        """Returns the last hidden state of every place; if `at_Q` names some, only theirs are right."""
        if self._last_block is not None:
            self._last_block.at_Q = at_Q
        depth_P = torch.from_numpy(tree.depth_P).to(self.device)
        hidden_1PW = self._decoder(
            input_ids=torch.from_numpy(tree.ids_P).to(self.device)[None],
            # A token's position is its place in its row, not among the packed tokens.
            position_ids=depth_P[None],
            use_cache=False,
            **({"forest": attention.Forest(tree.nodes, depth_P)} if self.shares else {}),
        ).last_hidden_state
        return hidden_1PW[0]

    def _apart(self, pack: Pack) -> Scored:
        """Computes each row by itself, so that nothing can be shared wrongly."""
        ids_P = torch.from_numpy(pack.tree.ids_P)
        hidden = {}
        computed = 0
        for where_T in pack.tree.where_R:
            ids_1T = ids_P[where_T].to(self.device)[None]
            states_1TW = self._decoder(input_ids=ids_1T, use_cache=False).last_hidden_state
            computed += len(where_T)
            hidden.update(zip(where_T.tolist(), states_1TW[0], strict=True))
        hidden_QW = torch.stack([hidden[place] for place in pack.at_Q.tolist()])
        logprob_N, entropy_N = logprobs(self._head, hidden_QW, *_asked(pack, self.device))
        return Scored(logprob_N, entropy_N, computed)

    def prove(self, examples: Sequence[Example]) -> None:
        """Checks on the training data that computing common beginnings once does not change the scores.

        If it does, the model computes all rows (token sequences) one by one from then on. The constructor compared
        short rows only, but a model may have a sliding window that only long rows exceed. So the longest row of all
        examples, and the row after it, are scored both together and one by one.
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
        # What a model that was written for another attention raises when it meets `forest` is of many kinds.
        except (attention.Unsupported, TypeError, ValueError, AttributeError, RuntimeError) as error:
            self._give_up(f"{type(error).__name__}: {error}")
            return
        self._attend_by(self._before)
        difference = float((together - self._apart(pack).logprob_N).square().mean().sqrt())
        self._attend_by(attention.NAME)
        if not difference <= TOLERANCE_NATS.get(self._causal.dtype, _COARSE_NATS):  # `not <=`: NaN is a difference too
            self._give_up(f"sharing changed log-probabilities by {difference:.2g} nats")

    def _give_up(self, why: str) -> None:
        self.why_apart = why
        self._attend_by(self._before)

    def _attend_by(self, name: str) -> None:
        if self._last_block is not None:
            self._last_block.at_Q = None  # the places of the last pack mean nothing in single rows
        self._causal.set_attn_implementation(name)


def _asked(pack: Pack, device: torch.device) -> tuple[Tensor | None, Tensor, Tensor]:
    # No temperatures where all are 1: this saves a pass over the logits.
    plain = bool((pack.temperature_Q == 1.0).all())
    return (
        None if plain else torch.from_numpy(pack.temperature_Q).to(device),
        torch.from_numpy(pack.place_N).to(device),
        torch.from_numpy(pack.target_N).to(device),
    )


def _fork(vocabulary: int) -> Pack:
    """Returns a pack of two rows that begin alike and a third that does not."""

    def row(*ids: int) -> Row:
        kept = tuple(i % vocabulary for i in ids)
        return Row(kept, (False, *(True,) * (len(kept) - 1)), (0.0,) * len(kept), (1.0,) * len(kept))

    rows = (row(11, 12, 13, 14, 15, 16), row(11, 12, 13, 17, 18), row(19, 12, 13))
    return packs_of([Example(rows)], 1 << 20)[0]


class LastBlock:
    """Restricts the second half of a model's last block to the positions from which sampled tokens are predicted.

    After the attention of the last block, tokens no longer influence each other. So its output projection and its MLP
    are computed only at these positions; elsewhere they return zeros, which are never used. In agent traffic most
    tokens are prompts and tool results, so this saves most of the work of one block.
    """

    def __init__(self, decoder: Any) -> None:
        """Replaces `forward` of `self_attn.o_proj` and `mlp`, if they have these names, in the decoder's last block."""
        # The positions to compute; `None` computes all. Set before a forward pass and not changed until the backward
        # pass is done, because a block that is recomputed in the backward pass needs the same positions.
        self.at_Q: Tensor | None = None
        block = decoder.layers[-1]
        for module in (getattr(getattr(block, "self_attn", None), "o_proj", None), getattr(block, "mlp", None)):
            if module is not None:
                module.forward = self._narrow(module.forward)

    def _narrow(self, whole: Any) -> Any:
        def forward(x_1PW: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.at_Q is None or x_1PW.dim() != 3 or len(x_1PW) != 1:
                return whole(x_1PW, *args, **kwargs)
            part = whole(x_1PW[:, self.at_Q], *args, **kwargs)
            part, *scores = part if isinstance(part, tuple) else (part,)  # gpt-oss also returns its router's scores
            wide = part.new_zeros((1, x_1PW.shape[1], part.shape[-1])).index_copy(1, self.at_Q, part)
            return (wide, *scores) if scores else wide

        return forward


class Head:
    """Computes logits (..., V), at least fp32, from hidden states (..., W) as a causal language model does."""

    def __init__(self, model: Any) -> None:
        """Takes the language head of `model`, and from its config how the model scales or caps the logits."""
        self._linear = model.get_output_embeddings()
        config = model.config.get_text_config()
        # Models change the head's output by a soft cap (Gemma 2), a factor (Cohere), or a divisor (Granite).
        self._cap = getattr(config, "final_logit_softcapping", None)
        self._factor = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        self.vocabulary: int = self._linear.weight.shape[0]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Returns the logits (..., V) of hidden states (..., W), scaled and capped as the model does it."""
        logits = self._linear(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self._factor != 1.0:
            logits = logits * self._factor
        return self._cap * torch.tanh(logits / self._cap) if self._cap else logits


def logprobs(
    head: Head, hidden_QW: Tensor, temperature_Q: Tensor | None, place_N: Tensor, target_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the log-probability of each of N target tokens, and the entropy of the distribution that predicts it.

    The entropy is in nats and has no gradient. `hidden_QW` is the last hidden state at each of the Q places from which
    targets are predicted, and `temperature_Q` divides the logits there; `None` means 1 everywhere. `place_N` is the
    index among the Q of the place from which each target is predicted, and `target_N` its token id.
    """
    # Places are cut into chunks of `step`, and targets sorted by place, so that those of a chunk stand together.
    step = max(1, CHUNK_LOGITS // head.vocabulary)
    order_N = torch.argsort(place_N, stable=True)
    edges = torch.arange(0, len(hidden_QW) + step, step, device=place_N.device).clamp_(max=len(hidden_QW))
    cuts = torch.searchsorted(place_N[order_N], edges).tolist()
    found: list[tuple[Tensor, Tensor]] = []
    for begin, first, last in zip(range(0, len(hidden_QW), step), cuts, cuts[1:], strict=False):
        mine = order_N[first:last]
        chunk = slice(begin, begin + step)
        divisor = None if temperature_Q is None else temperature_Q[chunk]
        arguments = (head, hidden_QW[chunk], divisor, place_N[mine] - begin, target_N[mine])
        # One chunk alone is kept: recomputing it would cost time and save nothing.
        again = len(hidden_QW) > step and torch.is_grad_enabled()
        found.append(checkpoint(_chunk, *arguments, use_reentrant=False) if again else _chunk(*arguments))
    back_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))
    logprob_N, entropy_N = (torch.cat(chunks)[back_N] for chunks in zip(*found, strict=True))
    return logprob_N, entropy_N


def _chunk(
    head: Head, hidden_QW: Tensor, temperature_Q: Tensor | None, place_N: Tensor, target_N: Tensor
) -> tuple[Tensor, Tensor]:
    logit_QV = head(hidden_QW)
    if temperature_Q is not None:
        logit_QV = logit_QV / temperature_Q[:, None]
    logprob_N, entropy_Q = _Chosen.apply(logit_QV, place_N, target_N)  # type: ignore[misc]
    return logprob_N, entropy_Q[place_N]


class _Chosen(torch.autograd.Function):
    """Computes log-probability and entropy in half of the passes over the logits that autograd would make."""

    # One softmax is computed and kept. Its largest entry gives the normaliser of all logits, and the gradient is the
    # one-hot choice less the softmax.
    @staticmethod
    def forward(ctx: Any, logit_QV: Tensor, place_N: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
        prob_QV = torch.softmax(logit_QV, dim=-1)
        top_Q, of_top_Q = logit_QV.amax(-1), prob_QV.amax(-1).log()
        ctx.save_for_backward(prob_QV, place_N, target_N)
        # The difference first, so that no log-probability is rounded to more than 0.
        logprob_N = (logit_QV[place_N, target_N] - top_Q[place_N]) + of_top_Q[place_N]
        # 0 * -inf is NaN: a token that cannot be sampled has no part in the entropy.
        below_QV = (logit_QV - top_Q[:, None]).clamp_min_(torch.finfo(logit_QV.dtype).min)
        # In place: logits, softmax and this are all that is held at once.
        entropy_Q = -below_QV.mul_(prob_QV).sum(-1) - of_top_Q
        ctx.mark_non_differentiable(entropy_Q)
        return logprob_N, entropy_Q

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        prob_QV, place_N, target_N = ctx.saved_tensors
        grad_N = grads[0]
        of_place_Q = grad_N.new_zeros(len(prob_QV)).index_add_(0, place_N, grad_N)  # a place may have many targets
        of_logit_QV = prob_QV * -of_place_Q[:, None]
        return of_logit_QV.index_put_((place_N, target_N), grad_N, accumulate=True), None, None
