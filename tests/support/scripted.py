"""A model whose answers a script gives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from openai.types.chat.chat_completion import Choice

import art_patch as art
from tests.rollouts.answers import choice


class Scripted(art.Agent):
    """Answers what it is told to, without a model; remembers what it was asked."""

    def __init__(self, answer: Callable[[str], str], **more: Any) -> None:
        super().__init__(art.TrainableModel(name="agent", project="p", base_model="b"), **more)
        self.answer = answer
        self.asked: list[list[Any]] = []

    async def generate_response(self, trajectory: art.Trajectory) -> Choice:
        await asyncio.sleep(0)
        conversation = trajectory.histories()[-1]
        self.asked.append(conversation.messages())
        found = choice(self.answer(conversation.messages()[-1]["content"]))  # type: ignore[arg-type, typeddict-item]
        conversation.messages_and_choices.append(found)
        return found
