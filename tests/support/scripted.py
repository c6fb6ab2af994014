"""Choices as an engine gives them to scripts, and a model whose answers a script gives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from openai.types.chat import ChatCompletion
from openai.types.chat.chat_completion import Choice

import art_patch as art
from art_patch.trajectories import hang


def choice(text: str = "yo", *, policy: str = "agent@0", tool_calls: list[dict[str, Any]] | None = None) -> Choice:
    """An answer of two tokens to a prompt of three."""
    said = {"role": "assistant", "content": text} | ({"tool_calls": tool_calls} if tool_calls else {})
    logprobs = {"content": [{"token": "y", "logprob": -0.5, "bytes": None, "top_logprobs": []}] * 2}
    body: dict[str, Any] = {
        "id": "c1", "object": "chat.completion", "created": 1, "model": policy, "prompt_token_ids": [1, 2, 3],
        "choices": [{"index": 0, "finish_reason": "stop", "message": said, "token_ids": [4, 5], "logprobs": logprobs}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }  # fmt: skip
    hang(body, {"temperature": 0.7, "messages": [], "store": True}, started_at=10.0, duration_ms=5.0)
    return ChatCompletion.model_validate(body).choices[0]


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
