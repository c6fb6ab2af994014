"""Rewards: groups of siblings in, a score for each sibling out.

RULER, in flow order: `question` and `tree` say what the judge gets to see of a group, `splitting` and `eliding` what
happens to what is too large, `prompt` puts it into words, `plan` counts it, `budget` allows it, `client` asks over
HTTP, `verdict` reads the answer, `judge` does that for many groups; `ruler_api` is the same as functions. `batch`
asks it with suspicion, as `planted_answers`, `injection` and `suspicion` decide. `combine` makes one reward of the
scores that stand side by side. Importing this needs no litellm; judging does.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
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
    from art_patch.rewards.feedback import PEOPLE, disagreement, satisfaction_G
    from art_patch.rewards.judge.budget import Budget
    from art_patch.rewards.judge.plan import Plan
    from art_patch.rewards.judge.prices import price_usd
    from art_patch.rewards.judge.prompt import read_prompt
    from art_patch.rewards.judge.question import Order
    from art_patch.rewards.judge.report import JudgeReport
    from art_patch.rewards.judge.rubric import DEFAULT_RUBRIC, Rubric, load_rubric
    from art_patch.rewards.judge.ruler import SCORE_NAME, SCORE_SOURCE, Judge, OnScored
    from art_patch.rewards.judge.ruler_api import (
        TrajectoryScore,
        ruler,
        ruler_score_group,
        ruler_score_group_sync,
        ruler_sync,
    )
    from art_patch.rewards.latest_score import newest, with_scores
else:
    __getattr__ = lazily(
        __name__,
        {
            "checks": "Check Checked load_checks run_checks",
            "combine": "COMBINED Combination REWARD_NAME REWARD_SOURCES RULER kept_scores load_combination rewards_G",
            "defences.batch": "JudgedBatch OrderedJudge judge_batch",
            "defences.labelled": "BUILTIN JudgeMetrics Labelled measure read_labelled",
            "defences.suspicion": "DefenceConfig",
            "feedback": "PEOPLE disagreement satisfaction_G",
            "judge.budget": "Budget",
            "judge.plan": "Plan",
            "judge.prices": "price_usd",
            "judge.prompt": "read_prompt",
            "judge.question": "Order",
            "judge.report": "JudgeReport",
            "judge.rubric": "DEFAULT_RUBRIC Rubric load_rubric",
            "judge.ruler": "Judge OnScored SCORE_NAME SCORE_SOURCE",
            "judge.ruler_api": "TrajectoryScore ruler ruler_score_group ruler_score_group_sync ruler_sync",
            "latest_score": "newest with_scores",
        },
    )
