"""Promotion: makes a policy champion, tests it beside the champion, and rolls it back.

`transitions` changes the state of policies, after the engine has proven that it serves them. `evidence` turns the calls
and scores of a test into one value a session and signal, `bets` has the rules of a test and measures how much these
values prove, and `sequential` decides whether the policy under test (canary or shadow; `challenger` in the code) is
better or worse than the champion.
"""

from art_patch.promotion.bets import RAMP, CanaryConfig, Proof, proofs_over_time
from art_patch.promotion.evidence import Evidence, evidence_of
from art_patch.promotion.notes import look_in_words, notices, with_gains
from art_patch.promotion.sequential import WatchVerdict, decide, decide_control
from art_patch.promotion.transitions import (
    challenge, change_share, check_promotion, control_group_to_come, end_test, ensure_loaded, give_up, promote,
    reject, rollback, rollback_target, unwanted, wanted,
)
