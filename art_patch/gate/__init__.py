"""The gate: the test that a candidate must pass before it serves.

Candidate and champion answer the same turns of held-out scenarios, from the recorded prompts, and no tool is executed.
If a function is replayable, both policies repeat whole runs of its scenarios instead. The judge ranks the answers or
runs of both policies in one group, without their names and in two orders. A paired test then compares the policies,
with the user as its unit (`paired_test`). In doubt the gate rejects the candidate. It also rejects one that fails a
check, however high its scores are: the answers have collapsed (`collapse`), or it is not proven to be worse than the
champion by at most `max_worse` on the user's suite and checks.
"""

from art_patch.gate.collapse import collapse_findings, failed_runs
from art_patch.gate.paired_test import (
    NO_USERS, TIE, CollapseConfig, Finding, GateConfig, Judged, Pair, lower_bound, merge_orders, not_worse, once_in,
)
from art_patch.gate.turns import (
    PREFIX, Answered, BlindComparison, Given, HeldOut, Repeated, Turn, add_to_suite, answered_in, blind_answers,
    blind_runs, data_hash, held_out_turns, new_users, read_suite, speaks_of, suite_row,
)
from art_patch.gate.verdict import (
    Gain, Verdict, agreement, decide, false_promotions, gains_in_words, normal_gain, paired_gain, results,
    with_findings,
)
