"""What ends an update: an error if it went wrong, early if it went far enough. Pure.

A value that is not finite drops the whole update, because what led there is in the weights already. A policy that
has moved far from the one that sampled is only a reason to stop: more steps on the same data would mislead it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from art_patch.training.config import TrainConfig

Metrics = Mapping[str, float]


def why_broken(metrics: Metrics) -> str | None:
    """Return what is not finite in a step's metrics, `None` if everything is; a step that saw no token is broken."""
    wrong = [name for name in ("loss", "grad_norm", "weight_norm") if not math.isfinite(metrics.get(name, 0.0))]
    if wrong:
        return " and ".join(f"{name} {metrics[name]}" for name in wrong)
    return None if metrics["tokens"] else "no finite log-probability"


def why_stop(metrics: Metrics, config: TrainConfig) -> str | None:
    """Return why an update ends before a step of these metrics is made, `None` if it goes on."""
    bounds = {"kl_nats": config.max_kl_nats, "clip_fraction": config.max_clip_fraction}
    for name, most in bounds.items():
        if most is not None and name in metrics and metrics[name] > most:
            return f"{name} {metrics[name]:.3g} is above max_{name}={most:g}"
    return None
