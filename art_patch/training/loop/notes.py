"""What is said of an update while it runs: one line a step."""

from __future__ import annotations

import time
from collections.abc import Callable

from art_patch.training.loop.checkpoint import TrainState
from art_patch.training.loop.job import TrainJob
from art_patch.types import JSON

Progress = Callable[[int, int, str], None]
"""Called with optimizer steps done, their total, and a word on it."""


def silently(done: int, total: int, note: str) -> None:
    """Tell nobody."""


class Notes:
    """Says how a step went and how long the rest will take."""

    def __init__(self, job: TrainJob, left: int) -> None:
        """Begin now.

        Args:
            job: the job.
            left: steps to take.
        """
        self._reward = None if job.mean_reward is None else f"reward {job.mean_reward:+.2f}"
        self._left = left
        self._taken = 0
        self._began = time.monotonic()

    def __call__(self, train_state: TrainState) -> str:
        """Return the line for the step that was just taken, or not."""
        if train_state.stopped is not None:
            return f"ended early: {train_state.stopped}"
        self._taken += 1
        metrics = train_state.history[-1]
        left_s = (time.monotonic() - self._began) / self._taken * (self._left - self._taken)
        parts = [
            self._reward,
            f"loss {metrics['loss']:+.4f}",
            f"KL {metrics['kl_nats']:.4f}" if "kl_nats" in metrics else None,
            _of_evaluation(metrics),
            f"{metrics['tokens_per_s']:,.0f} tokens/s",
            f"{left_s:.0f} s left",
        ]
        return ", ".join(part for part in parts if part)


def _of_evaluation(metrics: JSON) -> str | None:
    if "eval_loss" not in metrics:
        return None
    loss, kl, gain = (metrics[f"eval_{name}"] for name in ("loss", "kl_nats", "gain_nats"))
    return f"on other groups: loss {loss:+.4f}, KL {kl:.4f}, gain {gain:+.4f}"
