"""`Environment`: what a script writes, `reset`, `step`, and how states and actions read as text.

- **The seed is the scenario.** Episodes of one seed are siblings and are compared with each other, so `reset` begins
  each of them in the same state. After that, chance may differ between them.
- **Illegal actions.** `parse_action` raises a `ValueError`, or `step` raises an `IllegalAction` before it changes
  anything. The agent is told why and asked again, `attempts` times in all. Then the episode ends, and `illegal_reward`
  is added to its reward.
- **Any other exception is a failure**: it is kept beside the group, and the episode is not learned from.
- **Plain or async.** `reset`, `step` and `close` may be coroutine functions. Plain methods run in a thread of this
  environment's own, so they may be slow, and may keep objects that only their thread may use.

One object plays one episode at a time, and then the next.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, Generic, TypeVar

StateT = TypeVar("StateT")
ActionT = TypeVar("ActionT")

Step = tuple[StateT, float, bool, Mapping[str, Any]]
"""State, reward, done, info."""


class IllegalAction(ValueError):
    """An answer is no action, or is not possible now. The agent reads the message."""


class Environment(Generic[StateT, ActionT]):
    """A game or simulator: the class that a script extends.

    Attributes:
        instructions: the rules, which begin each conversation as its system message; empty for none.
        attempts: how often the agent is asked for an action in one state.
        illegal_reward: added when none of the answers is legal, which ends the episode.
    """

    instructions: str = ""
    # Class attributes, so that a script's class can set them without a constructor.
    attempts: int = 1
    illegal_reward: float = -1.0

    def reset(self, seed: int) -> StateT | Awaitable[StateT]:
        """Begin an episode and return its first state; the same one for the same seed."""
        raise NotImplementedError(f"{type(self).__name__} has no reset(seed)")

    def step(self, action: ActionT) -> Step[StateT] | Awaitable[Step[StateT]]:
        """Act.

        Returns:
            The next state, the reward of this step, whether the episode is done, and any other information. Numbers in
            `info["metrics"]` become metrics of the trajectory; a later step replaces an earlier one's.

        Raises:
            IllegalAction: the action is not possible in this state; nothing has changed.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step(action)")

    def close(self) -> Awaitable[None] | None:
        """Free what it holds; it is the last call."""
        return None

    def describe(self, state: StateT) -> str:
        """Return a state as text for the agent."""
        return str(state)

    def parse_action(self, answer: str, state: StateT) -> ActionT:
        """Return the action that an answer means: the answer itself without spaces around it, unless overridden.

        Raises:
            ValueError: the answer means no action; the agent reads the message.
        """
        found: Any = answer.strip()
        return found
