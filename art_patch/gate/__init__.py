"""The test that a candidate must pass before it serves.

Candidate and champion answer the same turns of held-out scenarios, from the prompts that traffic really had; no tool
is run. Where the user offered a function that may run again, both make whole runs of the scenario instead. Users who
just arrived have no say in what is asked, and no user makes up more than a share of it. The judge ranks each turn's
answers, or the runs, blind, both policies mixed, in two orders. The verdict compares them scenario by scenario and
fails closed: too few scenarios, missing scores or a lower bound at or below the margin reject. So does a failed check,
however well the candidate scores: answers that collapse, a frozen suite or a user's own check that gets worse.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
    from art_patch.gate.bounds import lower_bound
    from art_patch.gate.collapse import Answered, Given, collapse_findings
    from art_patch.gate.config import CollapseConfig, GateConfig
    from art_patch.gate.findings import Finding, not_worse
    from art_patch.gate.orders import Contest, Judged, merge_orders
    from art_patch.gate.runs import Repeated, answered_in, failed_runs, run_contest, speaks_of
    from art_patch.gate.suite import PREFIX, read_suite
    from art_patch.gate.turns import HeldOut, Turn, contest, data_hash, held_out_turns, new_users
    from art_patch.gate.verdict import Verdict, decide, with_findings
else:
    __getattr__ = lazily(
        __name__,
        {
            "bounds": "lower_bound",
            "collapse": "Answered Given collapse_findings",
            "config": "CollapseConfig GateConfig",
            "findings": "Finding not_worse",
            "orders": "Contest Judged merge_orders",
            "runs": "Repeated answered_in failed_runs run_contest speaks_of",
            "suite": "PREFIX read_suite",
            "turns": "HeldOut Turn contest data_hash held_out_turns new_users",
            "verdict": "Verdict decide with_findings",
        },
    )
