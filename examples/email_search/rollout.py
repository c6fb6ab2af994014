"""The agent's conversation as a trajectory with its reward: what training and evaluation share."""

from __future__ import annotations

from typing import Any

import questions
from agent import TOOLS, answer, final_answer, read_in
from openai.types.chat.chat_completion import Choice
from questions import Asked

import art_patch as art

NAME = "email-search"


async def rollout(model: art.Model[Any], asked: Asked) -> art.Trajectory:
    """Let a model answer a question; see `questions.reward`."""
    question = asked.question
    conversation = await answer(model.openai_client(), model.name, asked.inbox, question.text)
    said, read = final_answer(conversation), read_in(conversation)
    turns = sum(isinstance(item, Choice) for item in conversation)
    return art.Trajectory(
        messages_and_choices=conversation,
        tools=TOOLS,
        reward=questions.reward(question, said, read=read, turns=turns),
        metrics={
            "right": question.is_right(said),
            "read_it": question.email in read,
            "gave_up": questions.says_unknown(said),
            "turns": turns,
        },
    )
