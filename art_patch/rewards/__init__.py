"""Rewards: scores each sibling of a group, and combines a sibling's scores into one reward.

`judge` is RULER, an LLM judge, in the order of the data: `question` selects what it is shown, `prompt` writes it as
messages, `client` sends them within a budget, `question` parses the answer. `judge.ruler` does so for many groups;
`ruler` is for users of OpenPipe ART. `judge.teacher` asks a model for log-probabilities instead. `defences` looks for
signs that the judge was fooled, and measures how good a judge is. `checks` runs the user's scoring functions, and
`combine` computes the reward by a rule of `criteria`.
"""

from art_patch.rewards.checks import Check, Checked, load_checks, run_checks
from art_patch.rewards.combine import (
    COMBINED, PEOPLE, REWARD_NAME, REWARD_SOURCES, RULER, SCORE_NAME, SCORE_SOURCE, Combination, disagreement,
    kept_scores, newest, noise_of_judges, reward_noise, rewards_G, satisfaction_G, with_scores,
)
from art_patch.rewards.criteria import load_combination
from art_patch.rewards.defences.batch import JudgedBatch, OrderedJudge, both_ways, judge_batch
from art_patch.rewards.defences.labelled import BUILTIN, JudgeMetrics, Labelled, measure, read_labelled
from art_patch.rewards.defences.suspicion import DefenceConfig
from art_patch.rewards.judge.client import Budget, BudgetUsedUp, price_usd, require_price
from art_patch.rewards.judge.prompt import DEFAULT_RUBRIC, Rubric, load_rubric, read_prompt
from art_patch.rewards.judge.question import Order
from art_patch.rewards.judge.ruler import Judge, JudgeReport, OnScored, Plan
from art_patch.rewards.judge.teacher import Teacher
from art_patch.rewards.ruler import (
    TrajectoryScore, ruler, ruler_score_group, ruler_score_group_sync, ruler_sync,
)
