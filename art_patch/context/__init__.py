"""Says which trajectory, span and group a call belongs to, and takes what the app says about a run.

In: `trajectory()`, `span()`, `group()` and `suppress()` around the app's code. Out: an `Identity` for each call that
starts; trajectories, spans, scores and corrections for the store. The state lives in the current OpenTelemetry context.
It is read when a call starts and never again.

The identity is the first of these that exists: an explicit `trajectory()` (or an outermost `span()`); the active
OpenTelemetry trace; a conversation that extends an earlier one (found by `recording`); the single call.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
    from art_patch.context.ambient import Identity, identify
    from art_patch.context.own_calls import Passage, is_passing, passing
    from art_patch.context.replaying import note_no_more, offered, replayable
    from art_patch.context.scopes import bind, group, span, suppress, trajectory
    from art_patch.context.scoring import CAPTURED, correct, current_trajectory, reward, score
    from art_patch.context.threads import carry_threads_off, carry_threads_on
else:
    __getattr__ = lazily(
        __name__,
        {
            "ambient": "Identity identify",
            "replaying": "note_no_more offered replayable",
            "scopes": "bind group span suppress trajectory",
            "scoring": "CAPTURED correct current_trajectory reward score",
            "threads": "carry_threads_off carry_threads_on",
            "own_calls": "Passage is_passing passing",
        },
    )
