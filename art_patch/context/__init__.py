"""Context: which trajectory, span and group a call belongs to, and what the app says about it.

In: `trajectory()`, `span()`, `group()`, `suppress()` around the app's code. Out: an `Identity` for each call that
starts, and trajectories, spans, scores and corrections for the store. Ambient state lives on
`opentelemetry.context`; it is read when a call starts and never again.

Identity, first that holds: an explicit `trajectory()` (or an outermost `span()`); the active OpenTelemetry trace; a
conversation that extends an earlier one (found by `recording`); the single call.
"""

from __future__ import annotations

from art_patch.context.ambient import Identity, identify
from art_patch.context.captured import CAPTURED
from art_patch.context.replaying import replayable
from art_patch.context.scopes import bind, group, span, suppress, trajectory
from art_patch.context.scoring import correct, current_trajectory, reward, score

__all__ = [
    "CAPTURED",
    "Identity",
    "bind",
    "correct",
    "current_trajectory",
    "group",
    "identify",
    "replayable",
    "reward",
    "score",
    "span",
    "suppress",
    "trajectory",
]
