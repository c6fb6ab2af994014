"""`Agent`: what a state says -> the model's answer. The conversation is kept in the episode's trajectory.

One agent plays many episodes at once, so it holds nothing of any of them. Each answer's `Choice` is appended as the
model's own client gave it, with its exact tokens.

Whatever plays otherwise (tools, several calls for one action) is a class that overrides `generate_response` or
`select_action`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from art_patch.rollouts.trajectory import History, Trajectory

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice

    from art_patch.rollouts.model import Model


class Agent:
    """See the module.

    Attributes:
        model: that answers.
        keeps_history: whether what was said before in the episode stands before each question. Otherwise each state
            is a conversation of its own, which suits long episodes whose states say everything.
        params: of each request: `max_tokens`, `temperature`, ...
    """

    def __init__(self, model: Model[Any], *, keeps_history: bool = True, **params: Any) -> None:
        """Take the attributes by name."""
        self.model = model
        self.keeps_history = keeps_history
        self.params = params

    def begin(self, instructions: str) -> Trajectory:
        """Return the trajectory of an episode in which nothing was asked yet.

        Args:
            instructions: of the environment.
        """
        first: list[Any] = [{"role": "system", "content": instructions}] if instructions else []
        return Trajectory(messages_and_choices=first, reward=math.nan)

    async def select_action(self, state: str, trajectory: Trajectory) -> str:
        """Tell the model of a state and return what it answers, which the environment reads as an action.

        Args:
            state: as text; what is told after an answer that was no legal action says so too.
            trajectory: of the episode; what is said is appended there.
        """
        conversation = trajectory.histories()[-1].messages_and_choices
        if not self.keeps_history and trajectory.choices():
            instructions = [each for each in trajectory.messages_and_choices[:1] if _is_system(each)]
            trajectory.additional_histories.append(History(messages_and_choices=instructions))
            conversation = trajectory.additional_histories[-1].messages_and_choices
        conversation.append({"role": "user", "content": state})
        choice = await self.generate_response(trajectory)
        return choice.message.content or ""

    async def generate_response(self, trajectory: Trajectory) -> Choice:
        """Let the model go on with the trajectory's last conversation, and append its answer there."""
        conversation = trajectory.histories()[-1]
        answer: Any = await self.model.openai_client().chat.completions.create(
            model=self.model.name, messages=conversation.messages(), **self.params
        )
        choice: Choice = answer.choices[0]
        conversation.messages_and_choices.append(choice)
        return choice


def _is_system(item: Any) -> bool:
    return isinstance(item, dict) and item.get("role") == "system"
