"""The test that a candidate must pass before it serves.

Candidate and champion answer the same turns of held-out scenarios, from the prompts that traffic really had; no tool
is run. The judge ranks each turn's answers blind, both policies mixed. The verdict compares them scenario by scenario
and fails closed: too few scenarios, missing scores or a lower bound at or below the margin reject.
"""

from __future__ import annotations

from art_patch.gate.turns import Turn, contest, held_out_turns
from art_patch.gate.verdict import GateConfig, Verdict, decide

__all__ = ["GateConfig", "Turn", "Verdict", "contest", "decide", "held_out_turns"]
