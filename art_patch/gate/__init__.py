"""The test that a candidate must pass before it serves.

Candidate and champion answer the same turns of held-out scenarios, from the prompts that traffic really had; no tool
is run. Where the user offered a function that may run again, both make whole runs of the scenario instead. Users who
just arrived have no say in what is asked, and no user makes up more than a share of it. The judge ranks each turn's
answers, or the runs, blind, both policies mixed, in two orders. The verdict compares them scenario by scenario and
fails closed: too few scenarios, missing scores or a lower bound at or below the margin reject. So does a failed check,
however well the candidate scores: answers that collapse, a frozen suite or a user's own check that gets worse.
"""

from __future__ import annotations

from art_patch.gate.collapse import Answered, Given, collapse_findings
from art_patch.gate.config import CollapseConfig, GateConfig
from art_patch.gate.findings import Finding, not_worse
from art_patch.gate.orders import Contest, Judged, merge_orders
from art_patch.gate.runs import Repeated, answered_in, failed_runs, run_contest, speaks_of
from art_patch.gate.suite import read_suite
from art_patch.gate.turns import HeldOut, Turn, contest, data_hash, held_out_turns, new_users
from art_patch.gate.verdict import Verdict, decide, with_findings

__all__ = [
    "Answered",
    "CollapseConfig",
    "Contest",
    "Finding",
    "GateConfig",
    "Given",
    "HeldOut",
    "Judged",
    "Repeated",
    "Turn",
    "Verdict",
    "answered_in",
    "collapse_findings",
    "contest",
    "data_hash",
    "decide",
    "failed_runs",
    "held_out_turns",
    "merge_orders",
    "new_users",
    "not_worse",
    "read_suite",
    "run_contest",
    "speaks_of",
    "with_findings",
]
