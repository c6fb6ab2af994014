"""From a verdict to a served policy: states and moves as data, promote and roll back, and the test of a challenger."""

# pyright: reportUnusedImport=false
from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
    from art_patch.promotion.evidence import evidence_of
    from art_patch.promotion.transitions import (
        challenge,
        change_share,
        ensure_loaded,
        give_up,
        promote,
        reject,
        rollback,
        unwanted,
        wanted,
    )
    from art_patch.promotion.watching import CanaryConfig, WatchVerdict, decide
else:
    __getattr__ = lazily(
        __name__,
        {
            "evidence": "evidence_of",
            "transitions": "challenge change_share ensure_loaded give_up promote reject rollback unwanted wanted",
            "watching": "CanaryConfig WatchVerdict decide",
        },
    )
