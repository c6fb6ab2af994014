"""The probe of a policy: log-probabilities from the trainer, with which a server's are compared when it loads the LoRA.

When a policy is published, the trainer writes the log-probabilities of a few tokens into the manifest, with and without
the new LoRA. A server that loads the LoRA scores the same tokens. If the server applies the LoRA to the wrong layers,
with the wrong scaling or not at all, its numbers differ. The server itself reports no error in these cases (vLLM issue
34186). The module does no I/O and imports neither torch nor transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from art_patch.errors import AdapterRejected

ENTRY = "probe"  # of the manifest

# Largest and mean difference, in nats a token, that two correct implementations show. In float32 2.4e-6 was measured
# between vLLM and transformers, in bfloat16 5.2e-2 with a mean of 5.4e-3. GPUs sum in other orders, so each bound is
# several times as wide.
_TOLERANCE = {"float32": (1e-3, 1e-4), "float16": (0.25, 0.02), "bfloat16": (0.5, 0.05)}


@dataclass(frozen=True, slots=True)
class Probe:
    """A few tokens and the log-probabilities that the trainer computed for them, at temperature 1.

    Attributes:
        token_ids: The context tokens. At each position but the last, one possible next token is scored.
        logprobs: Log-probability of each scored token with the LoRA; one fewer than `token_ids`.
        base_logprobs: Log-probability of the same tokens under the base model without the LoRA.
        dtype: Precision in which the trainer computed, such as "bfloat16".
        target_ids: The scored tokens. At each position it is the likeliest next token with the LoRA, because engines
            report log-probabilities of the likeliest tokens only. In older manifests the list is empty, and the scored
            token is the next token of `token_ids`.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    base_logprobs: tuple[float, ...]
    dtype: str
    target_ids: tuple[int, ...] = ()

    @property
    def targets(self) -> tuple[int, ...]:
        """Ids of the scored tokens: one after each of `token_ids` but the last."""
        return self.target_ids or self.token_ids[1:]

    def entry(self) -> dict[str, Any]:
        """Returns the probe as a JSON object, which `read_probe` reads from the manifest."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def read_probe(name: str, manifest: Mapping[str, Any]) -> Probe | None:
    """Returns the probe in the manifest of the policy `name`; `None` if the manifest has no probe.

    Raises:
        AdapterRejected: The probe is malformed, or holds a log-probability that is not finite.
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
    """Compares a server's log-probabilities with the trainer's and returns the largest difference in nats.

    Args:
        name: Name of the policy, which error messages mention.
        probe: The trainer's log-probabilities, from the policy's manifest.
        served: The server's log-probabilities of the same tokens with the LoRA.
        base_served: The server's log-probabilities of the same tokens with the base model alone; `None` if the server
            did not compute them.
        dtype: Precision in which the server computes. The coarser precision of trainer and server sets the tolerance.

    Raises:
        AdapterRejected: The difference is larger than rounding explains; a server's number is not finite; or the LoRA
            changed a number far more than rounding does, but the server's numbers are nearly those of its base model
            (the LoRA is not applied).
    """
    if len(served) != len(probe.logprobs) or not all(math.isfinite(value) for value in served):
        raise AdapterRejected(f"{name}: the engine's log-probabilities are not finite. Drop this step.")
    most, mean = max(_TOLERANCE.get(kind, _TOLERANCE["bfloat16"]) for kind in (dtype, probe.dtype))
    gaps = _gaps(served, probe.logprobs)
    if base_served is not None:
        # A LoRA that is not applied can lie within the tolerance in bfloat16. This tells the two apart, but only where
        # the LoRA moves something by far more than rounding, as the trainer's own two numbers say.
        moved = _gaps(probe.logprobs, probe.base_logprobs)
        if max(moved) > 10 * most and max(_gaps(served, base_served)) < most / 10:
            raise AdapterRejected(
                f"{name}: it was loaded, and the engine answers as the base model does: the LoRA is not applied. "
                "Train it for the base that serves, on layers that the engine knows."
            )
    # The mean too: a wrong scaling moves every token a little, and rounding moves a few tokens far.
    if max(gaps) > most or sum(gaps) / len(gaps) > mean:
        raise AdapterRejected(
            f"{name}: the engine's log-probabilities are up to {max(gaps):.2g} nats from the trainer's "
            f"({most:g} are explained by {dtype}). It was trained on another base than serves, or with another scaling."
        )
    return max(gaps)


def _gaps(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    return [abs(one - other) for one, other in zip(ones, others, strict=True)]
