"""Promotion: how a policy comes to serve, how it is tested beside the champion, and how it is taken back.

`transitions` moves policies between states, once the engine has proven that it serves them. `evidence` turns the calls
and scores of a test into paired comparisons. `sequential` decides whether the challenger is better or worse.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from art_patch.promotion.evidence import evidence_of
from art_patch.promotion.sequential import CanaryConfig, WatchVerdict, decide
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
