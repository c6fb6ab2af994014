"""Rewards: groups of siblings in, a score for each sibling out.

`prompt` and `verdict` say what the judge is asked and how its answer is read, `client` asks it over HTTP, `judge` does
that for many groups, `combine` makes one reward of the scores that stand side by side. All but `client` and `judge`
are pure. Importing this needs no litellm; judging does.
"""

from art_patch.rewards.combine import rewards_G
from art_patch.rewards.judge import Judge, JudgeReport
from art_patch.rewards.rubric import DEFAULT_RUBRIC, Rubric, load_rubric

__all__ = ["DEFAULT_RUBRIC", "Judge", "JudgeReport", "Rubric", "load_rubric", "rewards_G"]
