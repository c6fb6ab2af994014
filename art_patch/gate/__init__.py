"""The gate: the test that a candidate must pass before it serves.

Candidate and champion answer the same turns of held-out scenarios, from the recorded prompts; no tool is executed.
Where the user offered a function that may run again, both policies make whole runs of the scenario instead. The judge
ranks the answers or runs of both policies in one blind group, in two orders. A paired test then compares the policies,
with the scenario as its unit (`paired_test`). The gate fails closed: too few scenarios, missing scores, or a lower
confidence bound that is not above the margin reject the candidate. So does one failed check, however well the candidate
scores: collapsed answers (`collapse`), a frozen suite, or a user's check that gets worse.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from art_patch.gate.collapse import collapse_findings, failed_runs
from art_patch.gate.config import CollapseConfig, GateConfig
from art_patch.gate.paired_test import (
    Finding,
    Judged,
    Verdict,
    decide,
    lower_bound,
    merge_orders,
    not_worse,
    with_findings,
)
from art_patch.gate.turns import (
    PREFIX,
    Answered,
    BlindComparison,
    Given,
    HeldOut,
    Repeated,
    Turn,
    answered_in,
    blind_answers,
    blind_runs,
    data_hash,
    held_out_turns,
    new_users,
    read_suite,
    speaks_of,
)
