"""`Environment`: what a script writes, `reset`, `step`, and how states and actions read as text.

- **The seed says the scenario.** Episodes of one seed are siblings and are compared with each other, so `reset` begins
  each of them in the same state; what chance does afterwards may differ.
- **One rule for what is no legal action.** `parse_action` raises a `ValueError`, or `step` an `IllegalAction` before it
  changes anything. The agent is told why and asked again, `attempts` times in all; then the episode ends, and
  `illegal_reward` is added to what was earned.
- **Any other exception is a failure**: the episode is kept with it and is not learned from.
- **Plain or async.** `reset`, `step` and `close` may be coroutine functions. What is plain runs in a thread that is
  this environment's own, so it may be slow, and keep what only its thread may use.

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
    """An answer is no action, or none that is possible now. The message is for the agent."""


class Environment(Generic[StateT, ActionT]):
    """See the module.

    Attributes:
        instructions: the rules, which begin each conversation as its system message; empty for none.
        attempts: how often the agent is asked for an action in one state.
        illegal_reward: added when none of them is legal, which ends the episode.
    """

    instructions: str = ""
    attempts: int = 1
    illegal_reward: float = -1.0

    def reset(self, seed: int) -> StateT | Awaitable[StateT]:
        """Begin an episode and return its first state; the same one for the same seed."""
        raise NotImplementedError(f"{type(self).__name__} has no reset(seed)")

    def step(self, action: ActionT) -> Step[StateT] | Awaitable[Step[StateT]]:
        """Act.

        Returns:
            The next state, the reward of this step, whether the episode is done, and anything else: numbers in
            `info["metrics"]` are kept as the trajectory's metrics, those of a later step in place of an earlier one's.

        Raises:
            IllegalAction: it is not possible in this state; nothing has changed.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step(action)")

    def close(self) -> Awaitable[None] | None:
        """Let go of what it holds; no call follows."""
        return None

    def describe(self, state: StateT) -> str:
        """Return what the agent is told of a state."""
        return str(state)

    def parse_action(self, answer: str, state: StateT) -> ActionT:
        """Return the action that an answer means: the answer itself without spaces around it, unless overridden.

        Raises:
            ValueError: it means none; the message is for the agent.
        """
        found: Any = answer.strip()
        return found
