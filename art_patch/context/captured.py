"""The trajectory that `capture_auto_trajectory` around the running code is making; its class is in `rollouts`."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from art_patch.context.scoring import current_trajectory as surrounding
from art_patch.types import TrajectoryInfo

CAPTURED: ContextVar[Any] = ContextVar("art_patch_captured", default=None)
"""`None` outside of it."""


def current_trajectory() -> TrajectoryInfo | Any | None:
    """Return the trajectory that surrounds the running code, by `trajectory()` or by an OpenTelemetry trace.

    In `capture_auto_trajectory` that is the `Trajectory` which is being captured, and which a reward can be given to.
    `None` where there is none of them, even if later a conversation is stitched together.
    """
    return CAPTURED.get() or surrounding()
