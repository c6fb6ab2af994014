"""What a policy computed when it was published, kept in its manifest, and whether a server computes the same.

The trainer writes the log-probabilities of a few tokens, with and without the new LoRA. A server that loads it scores
the same tokens: a LoRA that is applied to the wrong layers, with the wrong scaling or not at all gives others, and
nothing else would show it (vLLM issue 34186). Pure; imports neither torch nor transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from art_patch.errors import AdapterRejected

ENTRY = "probe"
"""Its name in the manifest."""

# Largest difference and mean difference, nats a token, that two correct implementations show. In float32 2.4e-6 was
# measured between vLLM and transformers, in bfloat16 5.2e-2 and a mean of 5.4e-3; GPUs sum in other orders.
_TOLERANCE = {"float32": (1e-3, 1e-4), "float16": (0.25, 0.02), "bfloat16": (0.5, 0.05)}


@dataclass(frozen=True, slots=True)
class Probe:
    """Tokens and what the trainer says of them.

    Attributes:
        token_ids: the context; something is scored after each of them but the last.
        logprobs: with the LoRA, at temperature 1; one less than tokens.
        base_logprobs: without it, of the same.
        dtype: in which the trainer computed.
        target_ids: what is scored: the likeliest token at each place, with the LoRA, because engines tell of the
            likeliest. Empty in older manifests: there it is the token that follows.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    base_logprobs: tuple[float, ...]
    dtype: str
    target_ids: tuple[int, ...] = ()

    @property
    def targets(self) -> tuple[int, ...]:
        """What is scored at each place."""
        return self.target_ids or self.token_ids[1:]

    def entry(self) -> dict[str, Any]:
        """Returns what the manifest holds."""
        return {
            "token_ids": list(self.token_ids),
            "logprobs": list(self.logprobs),
            "base_logprobs": list(self.base_logprobs),
            "dtype": self.dtype,
            "target_ids": list(self.target_ids),
        }


def read_probe(name: str, manifest: Mapping[str, Any]) -> Probe | None:
    """Returns the manifest's probe; `None` if whoever published the policy wrote none.

    Raises:
        AdapterRejected: It is malformed, or holds something that is not finite.
    """
    entry: Any = manifest.get(ENTRY)
    if entry is None:
        return None
    try:
        fields = cast("dict[str, Any]", entry)
        probe = Probe(
            tuple(int(token) for token in fields["token_ids"]),
            tuple(float(value) for value in fields["logprobs"]),
            tuple(float(value) for value in fields["base_logprobs"]),
            str(fields["dtype"]),
            tuple(int(token) for token in fields.get("target_ids") or ()),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise AdapterRejected(f"{name}: the manifest's probe cannot be read ({error!r}). Publish it again.") from error
    places = len(probe.token_ids) - 1
    if not len(probe.logprobs) == len(probe.base_logprobs) == len(probe.targets) == places or not places:
        raise AdapterRejected(f"{name}: the manifest's probe has the wrong number of values. Publish it again.")
    if not all(math.isfinite(value) for value in probe.logprobs + probe.base_logprobs):
        raise AdapterRejected(
            f"{name}: the trainer's own log-probabilities are not finite. The training diverged; drop this step."
        )
    return probe


def check_probe(
    name: str, probe: Probe, served: Sequence[float], base_served: Sequence[float] | None, *, dtype: str
) -> float:
    """Compares a server's log-probabilities with the trainer's.

    Args:
        name: The policy.
        probe: What the trainer says.
        served: What the server says, with the policy.
        base_served: What it says for the bare base.
        dtype: In which the server computes; the coarser of the two sides counts.

    Returns:
        The largest difference, nats.

    Raises:
        AdapterRejected: They differ by more than precision explains, or the policy answers as the base does.
    """
    if len(served) != len(probe.logprobs) or not all(math.isfinite(value) for value in served):
        raise AdapterRejected(f"{name}: the engine's log-probabilities are not finite. Drop this step.")
    most, mean = max(_TOLERANCE.get(kind, _TOLERANCE["bfloat16"]) for kind in (dtype, probe.dtype))
    gaps = _gaps(served, probe.logprobs)
    # Without the LoRA the trainer's own distance says how far off a LoRA that is not applied would be.
    if base_served is not None:
        moved = _gaps(probe.logprobs, probe.base_logprobs)
        if max(moved) > 10 * most and max(_gaps(served, base_served)) < most / 10:
            raise AdapterRejected(
                f"{name}: it was loaded, and the engine answers as the base model does: the LoRA is not applied. "
                "Train it for the base that serves, on layers that the engine knows."
            )
    if max(gaps) > most or sum(gaps) / len(gaps) > mean:
        raise AdapterRejected(
            f"{name}: the engine's log-probabilities are up to {max(gaps):.2g} nats from the trainer's "
            f"({most:g} are explained by {dtype}). It was trained on another base than serves, or with another scaling."
        )
    return max(gaps)


def _gaps(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    return [abs(one - other) for one, other in zip(ones, others, strict=True)]
