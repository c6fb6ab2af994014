"""`GymnasiumEnvironment`: an environment of the package `gymnasium`, played in words.

`describe` and `parse_action` work for every environment, see `observation`. A state is an `Observation`. Override both
to word states and actions so that a model understands them better. Truncated and terminated episodes are both done;
`info` tells them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from art_patch.rollouts.environments import observation as words
from art_patch.rollouts.environments.environment import Environment, Step
from art_patch.rollouts.environments.observation import Observation, observe


class GymnasiumEnvironment(Environment[Observation, Any]):
    """See the module."""

    def __init__(
        self,
        make: str | Callable[..., Any],
        *,
        instructions: str = "",
        actions: Sequence[str] | None = None,
        attempts: int = 1,
        illegal_reward: float = -1.0,
        **options: Any,
    ) -> None:
        """Make the environment when the first episode begins.

        Args:
            make: its id, or what makes it.
            instructions: see `Environment`.
            actions: names of the actions, the first for the lowest number; numbers unless given.
            attempts: see `Environment`.
            illegal_reward: see `Environment`.
            options: of the environment; `render_mode="ansi"` shows how it draws itself, if it can.
        """
        self.instructions, self.attempts, self.illegal_reward = instructions, attempts, illegal_reward
        self._make_it, self._options, self._names = make, options, actions
        self._made: Any = None

    def reset(self, seed: int) -> Observation:
        """Begin an episode, as the environment does with this seed."""
        if self._made is None:
            self._made = self._make()
        observation, info = self._made.reset(seed=seed)
        return self._see(observation, info)

    def step(self, action: Any) -> Step[Observation]:
        """Act."""
        observation, reward, terminated, truncated, info = self._made.step(action)
        told = {**info, "terminated": bool(terminated), "truncated": bool(truncated)}
        return self._see(observation, info), float(reward), bool(terminated or truncated), told

    def close(self) -> None:
        """Close the environment."""
        if self._made is not None:
            self._made.close()

    def describe(self, state: Observation) -> str:
        """Return how the environment draws itself, or the observation, and the actions that are legal."""
        return words.describe(state, self._names)

    def parse_action(self, answer: str, state: Observation) -> Any:
        """Return the last action that the answer names."""
        return words.parse(answer, state, self._names)

    def _make(self) -> Any:
        if not isinstance(self._make_it, str):
            return self._make_it(**self._options)
        import gymnasium

        return gymnasium.make(self._make_it, **self._options)

    def _see(self, observation: Any, info: Any) -> Observation:
        return observe(self._made, observation, info, self._made.action_space)
