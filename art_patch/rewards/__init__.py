"""Rewards: groups of siblings in, a score for each sibling out, and one reward of several scores.

`judge` is RULER, in the order of the data: `question` (what the judge is shown), `prompt` (in words), `ruler` (many
groups) with `client` (HTTP) and `cost` (budget), `verdict` (the answer); `ruler_api` offers it as functions. `defences`
asks the judge with suspicion and measures it. `checks` runs the user's code, `scores` reads stored scores, and
`combine` makes the reward. Importing this needs no litellm; judging does.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from art_patch.rewards.checks import Check, Checked, load_checks, run_checks
from art_patch.rewards.combine import (
    COMBINED,
    REWARD_NAME,
    REWARD_SOURCES,
    RULER,
    Combination,
    kept_scores,
    load_combination,
    rewards_G,
)
from art_patch.rewards.defences.batch import JudgedBatch, OrderedJudge, judge_batch
from art_patch.rewards.defences.labelled import BUILTIN, JudgeMetrics, Labelled, measure, read_labelled
from art_patch.rewards.defences.suspicion import DefenceConfig
from art_patch.rewards.judge.cost import Budget, price_usd
from art_patch.rewards.judge.prompt import DEFAULT_RUBRIC, Rubric, load_rubric, read_prompt
from art_patch.rewards.judge.question import Order
from art_patch.rewards.judge.ruler import Judge, OnScored, Plan
from art_patch.rewards.judge.ruler_api import (
    TrajectoryScore,
    ruler,
    ruler_score_group,
    ruler_score_group_sync,
    ruler_sync,
)
from art_patch.rewards.judge.verdict import JudgeReport
from art_patch.rewards.scores import (
    PEOPLE,
    SCORE_NAME,
    SCORE_SOURCE,
    disagreement,
    newest,
    satisfaction_G,
    with_scores,
)
