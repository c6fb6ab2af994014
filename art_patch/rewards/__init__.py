"""Rewards: groups of siblings in, a score for each sibling out.

RULER, in flow order: `question` and `tree` say what the judge gets to see of a group, `splitting` and `eliding` what
happens to what is too large, `prompt` puts it into words, `plan` counts it, `budget` allows it, `client` asks over
HTTP, `verdict` reads the answer, `judge` does that for many groups; `ruler_api` is the same as functions. `batch`
asks it with suspicion, as `canaries`, `injection` and `defences` have it. `combine` makes one reward of the scores that
stand side by side. Importing this needs no litellm; judging does.
"""

from art_patch.rewards.budget import Budget
from art_patch.rewards.combine import rewards_G
from art_patch.rewards.judge import Judge
from art_patch.rewards.plan import Plan
from art_patch.rewards.report import JudgeReport
from art_patch.rewards.rubric import DEFAULT_RUBRIC, Rubric, load_rubric
from art_patch.rewards.ruler_api import (
    TrajectoryScore,
    ruler,
    ruler_score_group,
    ruler_score_group_sync,
    ruler_sync,
)

__all__ = [
    "DEFAULT_RUBRIC",
    "Budget",
    "Judge",
    "JudgeReport",
    "Plan",
    "Rubric",
    "TrajectoryScore",
    "load_rubric",
    "rewards_G",
    "ruler",
    "ruler_score_group",
    "ruler_score_group_sync",
    "ruler_sync",
]
