"""Agents that learn from their own traffic, with one line.

::

    import art_patch as art
    art.patch()

The flow, in the words of the folders: `patching` routes each call of the OpenAI SDK to `serving` or upstream, under
the identity that `context` gives it; `recording` keeps it in the `store`; then `art-patch retrain` does
`grouping` -> `rewards` -> `training` -> `gate` -> `promotion`, as `cycle.py` reads from top to bottom.

Importing this package loads the standard library only: every public name below is imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "ArtPatchError",
    "Busy",
    "ConfigError",
    "EngineError",
    "GateRejected",
    "JudgeError",
    "StoreError",
    "TrainingError",
    "bind",
    "correct",
    "current_trajectory",
    "feedback_url",
    "flush",
    "group",
    "patch",
    "replayable",
    "reward",
    "score",
    "span",
    "status",
    "suppress",
    "trajectory",
    "unpatch",
    "wrap",
]

if TYPE_CHECKING:
    from art_patch.context import (
        bind,
        correct,
        current_trajectory,
        group,
        replayable,
        reward,
        score,
        span,
        suppress,
        trajectory,
    )
    from art_patch.errors import (
        ArtPatchError,
        Busy,
        ConfigError,
        EngineError,
        GateRejected,
        JudgeError,
        StoreError,
        TrainingError,
    )
    from art_patch.feedback import feedback_url
    from art_patch.patching import flush, patch, status, unpatch, wrap
else:
    _CONTEXT = (
        "bind", "correct", "current_trajectory", "group", "replayable", "reward", "score", "span", "suppress",
        "trajectory",
    )  # fmt: skip
    _HOME = dict.fromkeys(_CONTEXT, "context") | {"feedback_url": "feedback"}
    _HOME |= dict.fromkeys(("flush", "patch", "status", "unpatch", "wrap"), "patching")

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        from art_patch.garbage import uncollected

        with uncollected():
            value = getattr(import_module(f"{__name__}.{_HOME.get(name, 'errors')}"), name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted(__all__)
