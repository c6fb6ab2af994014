"""`PettingZooEnvironment`: a game of the package `pettingzoo` (its AEC API), in which one player is the agent.

The others move by a function: at random unless given, or by `same_policy(agent)`, which is self-play. What they ask a
model is not learned from. Which player the agent is goes by the seed, each in turn, unless it is named; siblings are
the same player. The agent's reward of a step is all that its player got until its next turn.

Give games as they are made for turns; `pettingzoo.utils.parallel_to_aec` makes one of a parallel game.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from art_patch.errors import ConfigError
from art_patch.rollouts.environments import observation as words
from art_patch.rollouts.environments.agent import Agent
from art_patch.rollouts.environments.environment import Environment, Step
from art_patch.rollouts.environments.observation import Observation, observe
from art_patch.rollouts.environments.own_thread import OwnThread

Turn = tuple[Observation, float, bool]
"""What a player sees when it is its turn, what it got since the last one, and whether it is out of the game."""


class PettingZooEnvironment(Environment[Observation, Any]):
    """See the module.

    Attributes:
        random: for the other players; begins anew with each episode's seed.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        *,
        player: str | None = None,
        others: Callable[[PettingZooEnvironment, Observation], Any | Awaitable[Any]] | None = None,
        instructions: str = "",
        actions: Sequence[str] | None = None,
        attempts: int = 1,
        illegal_reward: float = -1.0,
        **options: Any,
    ) -> None:
        """Make the game when the first episode begins.

        Args:
            make: makes the game, as the module's `env` does.
            player: whom the agent plays; each in turn unless given.
            others: returns another player's action, of this environment and of what that player sees; a coroutine
                function, or one that is run in the game's thread. `random_action` unless given.
            instructions: see `Environment`.
            actions: names of the actions, the first for the lowest number; numbers unless given.
            attempts: see `Environment`.
            illegal_reward: see `Environment`.
            options: of the game; `render_mode="ansi"` shows how it draws itself, if it can.
        """
        self.instructions, self.attempts, self.illegal_reward = instructions, attempts, illegal_reward
        self.random = random.Random()
        self._make, self._options, self._names = make, options, actions
        self._named, self._others = player, others or random_action
        self._game: Any = None
        self._thread: OwnThread | None = None
        self._player = ""
        self._early = 0.0

    async def reset(self, seed: int) -> Observation:
        """Begin a game, and let the others move until it is the agent's turn."""
        await self._run(self._begin, seed)
        state, self._early, done = await self._until_our_turn()
        if done:
            raise ConfigError(f"{self._player} had no turn in the game of seed {seed}; name another player")
        return state

    async def step(self, action: Any) -> Step[Observation]:
        """Act, and let the others move until it is the agent's turn again, or the end."""
        await self._run(self._game.step, action)
        state, reward, done = await self._until_our_turn()
        early, self._early = self._early, 0.0
        return state, early + reward, done, state.info

    async def close(self) -> None:
        """Close the game."""
        if self._thread is not None:
            self._thread.end(None if self._game is None else self._game.close)

    def describe(self, state: Observation) -> str:
        """Return how the game draws itself, or the observation, and the actions that are legal."""
        return words.describe(state, self._names)

    def parse_action(self, answer: str, state: Observation) -> Any:
        """Return the last action that the answer names."""
        return words.parse(answer, state, self._names)

    async def _until_our_turn(self) -> Turn:
        while True:
            state, reward, done = await self._run(self._look)
            if state.player == self._player:
                return state, reward, done
            if done:
                action = None  # which is how a player that is out leaves the game
            elif inspect.iscoroutinefunction(self._others):
                action = await self._others(self, state)
            else:
                action = await self._run(self._others, self, state)
            await self._run(self._game.step, action)

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._thread is None:
            self._thread = OwnThread()
        return await self._thread.run(function, *args)

    # in the game's thread

    def _begin(self, seed: int) -> None:
        if self._game is None:
            self._game = self._make(**self._options)
        self._game.reset(seed=seed)
        self.random.seed(seed)
        players = list(self._game.possible_agents)
        if self._named is not None and self._named not in players:
            raise ConfigError(
                f"player={self._named!r} is not in the game; choose one of: {', '.join(map(str, players))}"
            )
        self._player = players[seed % len(players)] if self._named is None else self._named

    def _look(self) -> Turn:
        game = self._game
        if self._player not in game.agents:  # it left with the last of the others
            raise ConfigError(f"{self._player} was taken out of the game before it was told how it ended")
        player = game.agent_selection
        observation, reward, terminated, truncated, info = game.last()
        state = observe(game, observation, info, game.action_space(player), player)
        return state, float(reward), bool(terminated or truncated)


def random_action(environment: PettingZooEnvironment, state: Observation) -> Any:
    """Return a legal action by chance, the same one for the same seed and the same moves before."""
    if state.legal is not None:
        return environment.random.choice(state.legal)
    state.space.seed(environment.random.randrange(2**31))
    return state.space.sample()


def same_policy(agent: Agent) -> Callable[[PettingZooEnvironment, Observation], Awaitable[Any]]:
    """Return a player that asks the agent's model as the agent does, each state by itself: self-play.

    Its answers that are no legal action become a random one.
    """

    async def other(environment: PettingZooEnvironment, state: Observation) -> Any:
        conversation = agent.begin(environment.instructions)
        answer = await agent.select_action(environment.describe(state), conversation)
        try:
            return environment.parse_action(answer, state)
        except ValueError:
            return random_action(environment, state)

    return other
