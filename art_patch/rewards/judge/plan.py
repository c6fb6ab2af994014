"""What would be sent to the judge for a group, how much it is and what it is likely to cost. Sends nothing."""

from __future__ import annotations

import random
from dataclasses import dataclass

from art_patch.rewards.judge.prices import count_tokens, price_usd
from art_patch.rewards.judge.prompt import JudgePrompt, write_prompt
from art_patch.rewards.judge.question import Order, Question, make_question, rng_of
from art_patch.rewards.judge.rubric import Rubric
from art_patch.rewards.judge.splitting import TooLongError, split
from art_patch.types import Group

_ANSWER_TOKENS = 100
"""What a judge is expected to write on one attempt. Those that think aloud write more; the budget learns how much."""


@dataclass(frozen=True, slots=True)
class Request:
    """One question to the judge.

    Attributes:
        prompt: what is sent.
        prompt_tokens: how much that is, by the tokenizer at hand.
        estimate_usd: what it is likely to cost; `None` if the judge's price is unknown.
    """

    prompt: JudgePrompt
    prompt_tokens: int
    estimate_usd: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The questions that judge one group.

    Attributes:
        group_id: whom they are about.
        attempts: distinct transcripts in the group.
        requests: one, or several where the group is split; none if `too_long`.
        too_long: why the group cannot be judged at all.
    """

    group_id: str
    attempts: int
    requests: tuple[Request, ...] = ()
    too_long: str | None = None


def plan_group(
    group: Group, rubric: Rubric, *, model: str, order: Order, max_prompt_tokens: int, max_siblings: int
) -> Plan:
    """Return the questions for one group.

    Args:
        group: the siblings.
        rubric: what the judge should value.
        model: litellm's name of the judge.
        order: of the attempts; the parts are the same for both.
        max_prompt_tokens: what one prompt may have.
        max_siblings: how many attempts may stand in one prompt.
    """

    def size(question: Question) -> int:
        return count_tokens(model, write_prompt(question, rubric, rng=random.Random(0)).text)

    whole = make_question(group)
    try:
        parts = split(
            whole, size, max_tokens=max_prompt_tokens, max_siblings=max_siblings, rng=rng_of(group, "anchors")
        )
    except TooLongError as error:
        return Plan(group.id, len(whole.attempts), too_long=str(error))
    requests: list[Request] = []
    for part in parts:
        prompt, tokens = write_prompt(part.turned(order), rubric, rng=random.SystemRandom()), size(part)
        requests.append(Request(prompt, tokens, price_usd(model, tokens, _ANSWER_TOKENS * len(part.attempts))))
    return Plan(group.id, len(whole.attempts), tuple(requests))
