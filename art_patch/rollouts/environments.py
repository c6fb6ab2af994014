"""The class `Environment`, which a script extends, and adapters that show `gymnasium` and `pettingzoo` as text.

- **The seed is the scenario.** Episodes with the same seed are siblings and are compared with each other, so `reset`
  must begin each of them in the same state. After that, chance may differ between them.
- **Illegal actions.** If an answer is not a legal action, `parse_action` raises a `ValueError`, or `step` raises an
  `IllegalAction` before it changes anything. The agent gets the error message and is asked again, up to `attempts`
  times in all. After the last attempt the episode ends, and `illegal_reward` is added to its reward.
- **Any other exception is a failure.** It is kept in the group's `exceptions`, and the episode is not trained on. The
  environment is closed and not used again, because its state is unknown.
- **Plain or async.** `reset`, `step` and `close` may be coroutine functions. Plain methods of one environment all run
  in one thread of its own, so they may be slow, and may hold objects that are bound to one thread.

An environment plays one episode at a time, and is then reused for the next.

In an adapter, a state is an `Observation`. Its text is the environment's drawing (`render_mode="ansi"`), or without a
drawing the observation itself, followed by the legal actions. In a `Discrete` action space an action is named by its
number or by a name from the script. If an answer names several actions, the last one is played, so that a model may
reason before it decides. Override `describe` and `parse_action` for better wording; other action spaces need their own
`parse_action`.
"""

import asyncio
import inspect
import random
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from art_patch.errors import ConfigError

T = TypeVar("T")
StateT = TypeVar("StateT")
ActionT = TypeVar("ActionT")

Step = tuple[StateT, float, bool, Mapping[str, Any]]
"""State, reward, done, info."""


class IllegalAction(ValueError):
    """An answer names no action, or an action that is not possible now; the error message is sent to the agent."""


class Environment(Generic[StateT, ActionT]):
    """A game or simulator in which an agent acts; a script extends this class.

    Attributes:
        instructions: the rules of the game, sent as the system message of each conversation; empty for no such message.
        attempts: how often the agent may answer in one state until an answer is a legal action.
        illegal_reward: added to the episode's reward if no attempt was legal, which ends the episode.
    """

    instructions: str = ""
    # Class attributes, so that a script's class can set them without a constructor.
    attempts: int = 1
    illegal_reward: float = -1.0

    def reset(self, seed: int) -> StateT | Awaitable[StateT]:
        """Start an episode and return its first state, which must be the same whenever the seed is the same.

        A `reset(self)` without a seed is called without one. Then siblings are compared although they may begin in
        different states, which adds noise.
        """
        raise NotImplementedError(f"{type(self).__name__} has no reset(seed)")

    def step(self, action: ActionT) -> Step[StateT] | Awaitable[Step[StateT]]:
        """Play an action; return the next state, the reward of this step, whether the episode is done, and the info.

        Numbers in `info["metrics"]` become metrics of the trajectory; if two steps set the same metric, the later value
        counts. Raise an `IllegalAction`, before anything changes, if the action is not possible in this state.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step(action)")

    def close(self) -> Awaitable[None] | None:
        """Free the resources of the environment; no other method is called after this one."""
        return None

    def describe(self, state: StateT) -> str:
        """Return the text that the agent is sent for a state; unless overridden, `str(state)`."""
        return str(state)

    def parse_action(self, answer: str, state: StateT) -> ActionT:
        """Return the action that the answer means; a `ValueError`, which the agent is told, if none."""
        found: Any = answer.strip()
        return found


class OwnThread:
    """A thread that runs one call at a time, so that the event loop is not blocked; the first call starts it."""

    def __init__(self) -> None:
        # One thread for all calls: an environment may hold objects of one thread, such as a connection to SQLite.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="art-patch-environment")

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call the function in the thread and return its result; if the caller is cancelled, the call runs on."""
        # `run_in_executor` does not carry context variables over, as `asyncio.to_thread` does.
        call = partial(copy_context().run, function, *args)
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def end(self, last: Callable[[], object] | None = None) -> None:
        """Let the thread finish its queued calls, then call `last` and end; does not wait for any of that."""
        if last is not None:
            self._executor.submit(last)
        self._executor.shutdown(wait=False)


# --- adapters ---


@dataclass(frozen=True, slots=True)
class Observation:
    """A state as its player sees it, with the environment's own `observation` and `info` objects."""

    observation: Any
    info: Mapping[str, Any]
    legal: tuple[int, ...] | None  # actions that are possible now; `None` if the action space is not `Discrete`
    text: str | None  # the environment's own drawing, if it was made with `render_mode="ansi"`
    player: str  # whose turn it is; empty in a single-player game
    space: Any  # the action space, an object of `gymnasium.spaces`


def observe(environment: Any, observation: Any, info: Mapping[str, Any], space: Any, player: str = "") -> Observation:
    """Return the state as an `Observation`; an `action_mask` in `observation` or `info` limits its legal actions."""
    from gymnasium.spaces import Discrete

    legal = None
    if isinstance(space, Discrete):
        # PettingZoo's classic games put the mask into the observation; Gymnasium's own environments into the info.
        inside = observation.get("action_mask") if isinstance(observation, Mapping) else None
        mask = info.get("action_mask") if inside is None else inside
        numbers = range(int(space.start), int(space.start) + int(space.n))
        legal = tuple(number for place, number in enumerate(numbers) if mask is None or mask[place])
    text = environment.render() if getattr(environment, "render_mode", None) == "ansi" else None
    return Observation(observation, info, legal, text, player, space)


class _InWords(Environment[Observation, Any]):
    def __init__(self, instructions: str, names: Sequence[str] | None, attempts: int, illegal_reward: float) -> None:
        self.instructions, self.attempts, self.illegal_reward = instructions, attempts, illegal_reward
        self._names = names

    def describe(self, state: Observation) -> str:
        """Return the environment's drawing of the state or else the observation, followed by the legal actions."""
        whole: Any = state.observation
        with_mask = isinstance(whole, Mapping) and "observation" in whole
        observation: Any = whole["observation"] if with_mask else whole
        if hasattr(observation, "tolist"):  # `str` of a long NumPy array leaves out its middle
            observation = observation.tolist()
        shown = str(observation) if state.text is None else state.text
        return shown if state.legal is None else f"{shown}\nLegal actions: {self._legal(state)}"

    def parse_action(self, answer: str, state: Observation) -> Any:
        """Return the last action that the answer names, or raise an `IllegalAction`."""
        if state.legal is None:
            raise ConfigError(f"actions of {state.space} have no numbers; override parse_action(answer, state)")
        if self._names is None:
            # Whole numbers alone: neither `3.5` nor `step-2` names an action.
            found = [int(each) for each in re.findall(r"(?<![\w.-])-?\d{1,9}(?![\w]|\.\d)", answer, re.ASCII)]
        else:
            places = {name.casefold(): int(state.space.start) + place for place, name in enumerate(self._names)}
            longest_first = sorted(places, key=len, reverse=True)  # else `up` would be found in `up left`
            pattern = rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)"
            found = [places[each] for each in re.findall(pattern, answer.casefold())]
        if not found:
            raise IllegalAction(f"That names no action. Legal actions: {self._legal(state)}")
        if found[-1] not in state.legal:
            raise IllegalAction(f"{self._name(found[-1], state)} is not legal now. Legal actions: {self._legal(state)}")
        return found[-1]

    def _legal(self, state: Observation) -> str:
        return ", ".join(self._name(action, state) for action in state.legal or ())

    def _name(self, action: int, state: Observation) -> str:
        return str(action) if self._names is None else self._names[action - int(state.space.start)]


class GymnasiumEnvironment(_InWords):
    """A `gymnasium` environment, played in text; `info` tells whether an episode was terminated or truncated."""

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
        """Create the object; the first episode creates the `gymnasium` environment.

        Arguments that are not listed here are the attributes of `Environment`.

        Args:
            make: the `gymnasium` environment's id, or a function that creates the environment.
            actions: names of the actions, from the lowest number on; without them actions are named by their numbers.
            options: arguments with which the environment is created; `render_mode="ansi"` shows its drawing.
        """
        super().__init__(instructions, actions, attempts, illegal_reward)
        self._make: Any = make
        self._options = options
        self._made: Any = None

    def reset(self, seed: int) -> Observation:
        """Start an episode with this seed and return its first state."""
        if self._made is None and isinstance(self._make, str):
            import gymnasium

            self._made = gymnasium.make(self._make, **self._options)
        elif self._made is None:
            self._made = self._make(**self._options)
        observation, info = self._made.reset(seed=seed)
        return observe(self._made, observation, info, self._made.action_space)

    def step(self, action: Any) -> Step[Observation]:
        """Play one action; return the next state, the reward, whether the episode is done, and the info."""
        observation, reward, terminated, truncated, info = self._made.step(action)
        state = observe(self._made, observation, info, self._made.action_space)
        ended = {"terminated": bool(terminated), "truncated": bool(truncated)}
        return state, float(reward), any(ended.values()), {**info, **ended}

    def close(self) -> None:
        """Close the `gymnasium` environment."""
        if self._made is not None:
            self._made.close()


Turn = tuple[Observation, float, bool]
"""A player's state at its turn, its reward since its last turn, and whether it is out of the game."""


class PettingZooEnvironment(_InWords):
    """A `pettingzoo` game (AEC API) in which the agent plays one player and a function plays all others.

    By default the other players move at random; `same_policy(agent)` lets the agent's own model play them (self-play).
    Requests for the other players are never trained on. The agent's reward for a step is the sum of its player's
    rewards up to its next turn. The game must be turn-based; `pettingzoo.utils.parallel_to_aec` converts a parallel
    game. Each episode seeds `random`, the generator for the other players.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        *,
        instructions: str = "",
        actions: Sequence[str] | None = None,
        player: str | None = None,
        others: Callable[["PettingZooEnvironment", Observation], Any | Awaitable[Any]] | None = None,
        attempts: int = 1,
        illegal_reward: float = -1.0,
        **options: Any,
    ) -> None:
        """Create the object; the first episode creates the `pettingzoo` game.

        Args:
            make: function that creates the game, such as `env` of the game's module.
            player: name of the player that the agent plays; without it the seed chooses, so that each gets its turn.
            others: function that chooses the action of another player, by default `random_action`; it is given this
                environment and that player's observation. A coroutine function runs on the event loop, any other in the
                game's thread. All other arguments are as in `GymnasiumEnvironment`.
        """
        super().__init__(instructions, actions, attempts, illegal_reward)
        self.random = random.Random()
        self._make, self._options = make, options
        self._named, self._others = player, others or random_action
        self._game: Any = None
        self._thread: OwnThread | None = None
        self._player = ""
        self._early = 0.0

    async def reset(self, seed: int) -> Observation:
        """Start a game with this seed, and let the other players move until it is the agent's turn."""
        await self._run(self._begin, seed)
        # The moves before the agent's first turn may bring a reward; it counts with the first step.
        state, self._early, done = await self._until_our_turn()
        if done:
            raise ConfigError(f"{self._player} had no turn in the game of seed {seed}; name another player")
        return state

    async def step(self, action: Any) -> Step[Observation]:
        """Play the agent's action, and let the others move until it is the agent's turn again or the game ends."""
        await self._run(self._game.step, action)
        state, reward, done = await self._until_our_turn()
        early, self._early = self._early, 0.0
        return state, early + reward, done, state.info

    async def close(self) -> None:
        """Close the `pettingzoo` game and end the thread in which it runs."""
        if self._thread is not None:
            self._thread.end(None if self._game is None else self._game.close)

    async def _until_our_turn(self) -> Turn:
        while True:
            state, reward, done = await self._run(self._look)
            if state.player == self._player:
                return state, reward, done
            if done:
                action = None  # AEC: a player that is out takes one last step, without an action, to leave the game
            # On the event loop, where `same_policy` asks a model; others may use the game, so they run in its thread.
            elif inspect.iscoroutinefunction(self._others):
                action = await self._others(self, state)
            else:
                action = await self._run(self._others, self, state)
            await self._run(self._game.step, action)

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._thread is None:  # not in `__init__`: a thread cannot be copied, and the trainer copies environments
            self._thread = OwnThread()
        return await self._thread.run(function, *args)

    # The methods below run in the game's thread.

    def _begin(self, seed: int) -> None:
        if self._game is None:
            self._game = self._make(**self._options)
        self._game.reset(seed=seed)
        self.random.seed(seed)
        players = list(self._game.possible_agents)
        if self._named is not None and self._named not in players:
            known = ", ".join(map(str, players))
            raise ConfigError(f"player={self._named!r} is not in the game; choose one of: {known}")
        self._player = players[seed % len(players)] if self._named is None else self._named

    def _look(self) -> Turn:
        game = self._game
        if self._player not in game.agents:  # the game removed it together with the last of the others
            raise ConfigError(f"{self._player} was taken out of the game before it was told how it ended")
        player = game.agent_selection
        observation, reward, terminated, truncated, info = game.last()
        state = observe(game, observation, info, game.action_space(player), player)
        return state, float(reward), bool(terminated or truncated)


def random_action(environment: PettingZooEnvironment, state: Observation) -> Any:
    """Return a random legal action for another player; the episode's seed and the earlier moves determine it."""
    if state.legal is not None:
        return environment.random.choice(state.legal)
    # The space has a generator of its own, which would not follow the seed of the episode.
    state.space.seed(environment.random.randrange(2**31))
    return state.space.sample()
