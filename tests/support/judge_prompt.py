"""The prompt that RULER makes of a whole group."""

from __future__ import annotations

import random

from art_patch.rewards import Order, Rubric
from art_patch.rewards.judge.prompt import JudgePrompt, write_prompt
from art_patch.rewards.judge.question import make_question
from art_patch.types import Group


def build_prompt(group: Group, rubric: Rubric, *, rng: random.Random, order: Order = "shuffled") -> JudgePrompt:
    return write_prompt(make_question(group).turned(order), rubric, rng=rng)
