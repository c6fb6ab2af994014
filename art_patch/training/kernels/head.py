"""From hidden states to log-probabilities of what was sampled, without ever holding all logits.

At a vocabulary of 150,000 the logits of one sequence outweigh the model. So the language head runs only at places from
which something is predicted, and in chunks of bounded size, whose logits are computed again in the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_LOGITS = 1 << 25
"""Logits held at once: 128 MiB in fp32."""


class Head:
    """Hidden states (..., width) to logits (..., vocabulary), at least fp32."""

    def __init__(self, model: Any) -> None:
        """Find out what a causal language model of transformers does after its last block.

        The three ways in which its models change the head's output are told by their configurations: a soft cap
        (Gemma 2), a factor (Cohere), a divisor (Granite).
        """
        self._linear = model.get_output_embeddings()
        config = model.config.get_text_config()
        self._cap = getattr(config, "final_logit_softcapping", None)
        self._factor = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        self.vocabulary: int = self._linear.weight.shape[0]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits."""
        logits = self._linear(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self._factor != 1.0:
            logits = logits * self._factor
        return self._cap * torch.tanh(logits / self._cap) if self._cap else logits


def logprobs(
    head: Head, hidden_QW: Tensor, temperature_Q: Tensor | None, place_N: Tensor, target_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target, and the entropy (nats, no gradient) at each of its places.

    Args:
        head: of the model.
        hidden_QW: the last hidden state at each place.
        temperature_Q: divides the logits; `None` is 1 everywhere.
        place_N: among the Q, from where a target is predicted.
        target_N: token ids.
    """
    step = max(1, CHUNK_LOGITS // head.vocabulary)
    order_N = torch.argsort(place_N, stable=True)
    edges = torch.arange(0, len(hidden_QW) + step, step, device=place_N.device).clamp_(max=len(hidden_QW))
    cuts = torch.searchsorted(place_N[order_N], edges).tolist()
    found: list[Tensor] = []
    entropies: list[Tensor] = []
    for begin, first, last in zip(range(0, len(hidden_QW), step), cuts, cuts[1:], strict=False):
        mine = order_N[first:last]
        chunk = slice(begin, begin + step)
        divisor = None if temperature_Q is None else temperature_Q[chunk]
        arguments = (head, hidden_QW[chunk], divisor, place_N[mine] - begin, target_N[mine])
        again = len(hidden_QW) > step and torch.is_grad_enabled()
        logprob, entropy = checkpoint(_chunk, *arguments, use_reentrant=False) if again else _chunk(*arguments)
        found.append(logprob)
        entropies.append(entropy)
    back_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))
    return torch.cat(found)[back_N], torch.cat(entropies)[back_N]


def _chunk(
    head: Head, hidden_QW: Tensor, temperature_Q: Tensor | None, place_N: Tensor, target_N: Tensor
) -> tuple[Tensor, Tensor]:
    logit_QV = head(hidden_QW)
    if temperature_Q is not None:
        logit_QV = logit_QV / temperature_Q[:, None]
    logprob_N, entropy_Q = _Chosen.apply(logit_QV, place_N, target_N)  # type: ignore[misc]
    return logprob_N, entropy_Q[place_N]


class _Chosen(torch.autograd.Function):
    """Log-probability of what was chosen, and entropy, in half of autograd's passes over the logits.

    One softmax is computed and kept: its largest entry tells what all logits were less, and the gradient is the choice
    less the softmax.
    """

    @staticmethod
    def forward(ctx: Any, logit_QV: Tensor, place_N: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
        prob_QV = torch.softmax(logit_QV, dim=-1)
        top_Q, of_top_Q = logit_QV.amax(-1), prob_QV.amax(-1).log()
        ctx.save_for_backward(prob_QV, place_N, target_N)
        # The difference first, so that no log-probability is rounded to more than 0.
        logprob_N = (logit_QV[place_N, target_N] - top_Q[place_N]) + of_top_Q[place_N]
        # 0 * -inf is NaN: what cannot be sampled has no part in the entropy.
        below_QV = (logit_QV - top_Q[:, None]).clamp_min_(torch.finfo(logit_QV.dtype).min)
        entropy_Q = -torch.linalg.vecdot(prob_QV, below_QV) - of_top_Q
        ctx.mark_non_differentiable(entropy_Q)
        return logprob_N, entropy_Q

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        prob_QV, place_N, target_N = ctx.saved_tensors
        grad_N = grads[0]
        of_place_Q = grad_N.new_zeros(len(prob_QV)).index_add_(0, place_N, grad_N)
        of_logit_QV = prob_QV * -of_place_Q[:, None]
        return of_logit_QV.index_put_((place_N, target_N), grad_N, accumulate=True), None, None
