"""Promotion: makes a policy champion, tests it beside the champion, and rolls it back.

`transitions` changes the state of policies, after the engine has proven that it serves them. `evidence` turns the calls
and scores of a test into one value a session and signal, `bets` measures how much these prove, `signals` has the rules
of a test, and `sequential` decides whether the policy under test (canary or shadow; `challenger` in the code) is better
or worse than the champion.
"""

from art_patch.promotion.evidence import Evidence, evidence_of
from art_patch.promotion.gains import with_gains
from art_patch.promotion.notice import look_in_words, notices
from art_patch.promotion.sequential import WatchVerdict, decide, decide_control
from art_patch.promotion.signals import RAMP, CanaryConfig, Proof, proofs_over_time
from art_patch.promotion.transitions import (
    challenge, change_share, check_promotion, control_group_to_come, end_test, ensure_loaded, give_up, promote,
    reject, rollback, rollback_target, unwanted, wanted,
)
