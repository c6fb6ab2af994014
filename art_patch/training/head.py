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
    head: Head, hidden_QW: Tensor, temperature_Q: Tensor, place_N: Tensor, target_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target, and the entropy (nats, no gradient) at each of its places.

    Args:
        head: of the model.
        hidden_QW: the last hidden state at each place.
        temperature_Q: divides the logits.
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
        arguments = (head, hidden_QW[chunk], temperature_Q[chunk], place_N[mine] - begin, target_N[mine])
        again = len(hidden_QW) > step and torch.is_grad_enabled()
        logprob, entropy = checkpoint(_chunk, *arguments, use_reentrant=False) if again else _chunk(*arguments)
        found.append(logprob)
        entropies.append(entropy)
    back_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))
    return torch.cat(found)[back_N], torch.cat(entropies)[back_N]


def _chunk(
    head: Head, hidden_QW: Tensor, temperature_Q: Tensor, place_N: Tensor, target_N: Tensor
) -> tuple[Tensor, Tensor]:
    logprob_QV = torch.log_softmax(head(hidden_QW) / temperature_Q[:, None], dim=-1)
    with torch.no_grad():
        # exp(-inf) * -inf is NaN: what cannot be sampled has no part in the entropy.
        entropy_Q = -(logprob_QV.exp() * logprob_QV).nan_to_num(0.0).sum(-1)
    return logprob_QV[place_N, target_N], entropy_Q[place_N]
