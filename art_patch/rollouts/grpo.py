"""`Agent` plays episodes of an environment; `GRPOTrainer` turns seeds into groups of episodes and the next policy.

    trainer = art.GRPOTrainer(art.Agent(model), Maze, learning_rate=1e-4, episodes_per_batch=64)
    for _ in range(20):
        await trainer.update_policy(await trainer.collect_episodes())

One agent plays many episodes at the same time, so it keeps no state of an episode. Each answer's `Choice` is appended
to the trajectory as the model's client returned it, with its exact tokens. For another way to play (tools, several
requests per action), override `generate_response` or `select_action` in a subclass.

The reward of an episode is the sum of the rewards of its steps. Its metrics are `actions` (their number), `illegal`
(the episode ended because no answer was a legal action), `cut` (it reached the step limit before it was done), and
those of the environment. If the environment or the agent raises, the exception carries the trajectory into its group.
"""

import math
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, overload

from openai.types.chat.chat_completion import Choice

from art_patch.errors import ConfigError
from art_patch.rollouts import environments
from art_patch.rollouts.backend import LocalBackend
from art_patch.rollouts.checkpoints import Checkpoint, read_checkpoint, write_checkpoint
from art_patch.rollouts.environment_pool import EnvironmentPool, Make, Worker, maker_of, takes_seed
from art_patch.rollouts.environments import Environment, Observation, PettingZooEnvironment
from art_patch.rollouts.model import Model, TrainableModel
from art_patch.rollouts.model_runtime import TrainResult
from art_patch.rollouts.trajectory import History, Trajectory, remember
from art_patch.rollouts.trajectory_group import PendingGroup, TrajectoryGroup, gather_trajectory_groups
from art_patch.training import TrainConfig


class Agent:
    """A model that plays episodes: it is sent a state and answers with an action.

    Attributes:
        model: the model that answers; a `Model`, which is never trained, can play, too. A base model, as a directory or
            Hugging Face id, becomes a `TrainableModel` in a project of its own.
        keeps_history: whether each request holds the episode's conversation so far. If false, each state starts a
            conversation of its own, which suits long episodes whose states contain all that matters.
        params: settings of each request: `max_tokens`, `temperature`, ...
    """

    # Whether the first use registers the model: of one that was given by name alone, nobody has done so.
    _registers = False

    def __init__(self, model: Model[Any] | str, *, keeps_history: bool = True, **params: Any) -> None:
        self._registers = isinstance(model, str)
        self.model = _model_of(model) if isinstance(model, str) else model
        self.keeps_history, self.params = keeps_history, params

    async def ready(self) -> Model[Any]:
        """Return the model; one that was given as a base model is registered with a `LocalBackend`, once."""
        if self._registers:
            self._registers = False
            try:
                await self.model.register(LocalBackend())
            except BaseException:
                self._registers = True
                raise
        return self.model

    async def save_checkpoint(self, path: str | PathLike[str]) -> Path:
        """Write the champion's name, no weights, to a JSON file; return its path."""
        champion = await (await self.ready()).runtime().champion()
        return write_checkpoint(path, Checkpoint(champion.name, 0, 0))

    async def load_checkpoint(self, path: str | PathLike[str]) -> None:
        """Promote the policy of a saved checkpoint; `ConfigError` if it is none of this model."""
        model = await self.ready()
        await model.runtime().promote(read_checkpoint(path, model=model.name).policy)

    def begin(self, instructions: str) -> Trajectory:
        """Return the trajectory of a new episode, with the environment's instructions as its system message."""
        first: list[Any] = [{"role": "system", "content": instructions}] if instructions else []
        return Trajectory(messages_and_choices=first, reward=math.nan)

    async def select_action(self, state: str, trajectory: Trajectory) -> str:
        """Send a state to the model and return its answer, which the environment reads as an action.

        Both are appended to the episode's trajectory. After an illegal action, `state` begins with the error message.
        """
        conversation = trajectory.histories()[-1].messages_and_choices
        # The first state stands in the main conversation; each later one opens a conversation of its own.
        if not self.keeps_history and trajectory.choices():
            first: list[Any] = trajectory.messages_and_choices[:1]
            instructions: list[Any] = [each for each in first if isinstance(each, dict) and each["role"] == "system"]
            trajectory.additional_histories.append(History(messages_and_choices=instructions))
            conversation = trajectory.additional_histories[-1].messages_and_choices
        conversation.append({"role": "user", "content": state})
        choice = await self.generate_response(trajectory)
        return choice.message.content or ""

    def parse_action(self, response: str, state: Any) -> Any:
        """Return the action that an answer means; an agent that does not override this leaves it to the environment."""
        return NotImplemented

    @overload
    async def generate_response(self, trajectory: str, **params: Any) -> str: ...

    @overload
    async def generate_response(self, trajectory: Trajectory, **params: Any) -> Choice: ...

    async def generate_response(self, trajectory: Trajectory | str, **params: Any) -> Choice | str:
        """Have the model answer the newest conversation of the trajectory, append the answer to it and return it.

        A prompt in its place is answered with a text, and `params` are settings of this request alone.
        """
        if isinstance(trajectory, str):
            asked: Any = [{"role": "user", "content": trajectory}]
            return (await (await self.ready()).create_completion(asked, **self.params | params)).content or ""
        conversation = trajectory.histories()[-1]
        answer: Any = await self.model.openai_client().chat.completions.create(
            model=self.model.name, messages=conversation.messages(), **self.params | params
        )
        conversation.messages_and_choices.append(answer.choices[0])
        return answer.choices[0]


def _model_of(base: str) -> TrainableModel[Any]:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(base).name).strip("-.") or "agent"
    return TrainableModel(name=name, project=name, base_model=base)


def same_policy(agent: Agent) -> Callable[[PettingZooEnvironment, Observation], Awaitable[Any]]:
    """Return a function that plays the other players with the agent's own model, for self-play.

    Each move is a conversation of its own. If the model's answer is no legal action, a random one is played.
    """

    async def other(environment: PettingZooEnvironment, state: Observation) -> Any:
        conversation = agent.begin(environment.instructions)
        answer = await agent.select_action(environment.describe(state), conversation)
        try:
            return environment.parse_action(answer, state)
        except ValueError:
            return environments.random_action(environment, state)

    return other


async def play(worker: Worker, agent: Agent, seed: int, *, max_steps: int) -> Trajectory:
    """Play one episode until it is done or has `max_steps` steps."""
    environment = await worker.environment()
    if environment.attempts < 1:
        raise ConfigError(f"attempts={environment.attempts} of {type(environment).__name__} must be at least 1")
    trajectory = agent.begin(environment.instructions)
    trajectory.metadata["seed"] = seed
    earned, steps, done, illegal = 0.0, 0, False, False
    try:
        state = await worker.call(environment.reset, *([seed] if takes_seed(environment) else []))
        while steps < max_steps and not done:
            step = await _one_step(worker, agent, trajectory, state)
            if step is None:
                earned, illegal = earned + environment.illegal_reward, True
                break
            state, reward, done, info = step
            earned, steps = earned + float(reward), steps + 1
            # Replaced and not added up: an environment reports totals, such as a score.
            trajectory.metrics.update(info.get("metrics", {}))
    except Exception as error:
        # Attached here, because the gathering would take the newest trajectory, which may be an opponent's.
        remember(error, trajectory)
        raise
    trajectory.reward = earned
    trajectory.metrics |= {"actions": steps, "illegal": illegal, "cut": not (done or illegal)}
    return trajectory.finish()


async def _one_step(worker: Worker, agent: Agent, trajectory: Trajectory, state: Any) -> environments.Step[Any] | None:
    """Ask until an action is legal and take it; return `None` if no answer is a legal action."""
    environment = await worker.environment()
    asked = described = await worker.call(environment.describe, state)
    for _ in range(environment.attempts):
        answer = await agent.select_action(asked, trajectory)
        try:
            action = agent.parse_action(answer, state)
            if action is NotImplemented:
                action = await worker.call(environment.parse_action, answer, state)
        except ValueError as error:
            asked = f"{error}\n\n{described}"
            continue
        try:
            return await worker.call(environment.step, action)
        # Only this error: a ValueError of `step` is a mistake of the environment, which may have changed its state.
        except environments.IllegalAction as error:
            asked = f"{error}\n\n{described}"
    return None


class GRPOTrainer:
    """Plays groups of episodes with an agent and trains the agent's model on them; counts its `updates`."""

    def __init__(
        self,
        agent: Agent,
        environment: Environment[Any, Any] | Make,
        learning_rate: float | None = None,
        batch_size: int | None = None,
        episodes_per_batch: int = 64,
        max_episode_length: int = 64,
        kl_penalty: float | None = None,
        *,
        group_size: int = 8,
        seeds: Sequence[int] | None = None,
        config: TrainConfig | None = None,
        parallel: int = 64,
        max_exceptions: float = 0.05,
    ) -> None:
        """Create the trainer; `collect_episodes` starts to play.

        Args:
            agent: the agent that plays; its model is trained, and must be registered before the first episode.
            environment: an `Environment` class, a function that creates environments, or one environment, of which each
                episode that runs at the same time then gets a copy.
            learning_rate: if given, replaces the one in `config`, like `batch_size` and `kl_penalty`.
            episodes_per_batch: episodes that one call of `collect_episodes` plays; a multiple of `group_size`.
            max_episode_length: number of steps after which an episode is ended.
            group_size: number of episodes with the same seed, which are compared with each other; at least 2.
            seeds: training seeds, used in turn and from the start again; without them 0, 1, 2, ... without end.
            config: all other settings of an update.
            parallel: largest number of episodes that run at the same time.
            max_exceptions: number of episodes in a batch that may raise, or their share if below 1.

        Raises:
            ConfigError: a number is out of its range, or the environment cannot be copied.
        """
        self.agent = agent
        self.updates = 0
        self._make = maker_of(environment)
        given = {"learning_rate": learning_rate, "batch_size": batch_size, "kl_penalty": kl_penalty}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        model = agent.model
        own = model.update_config(config) if isinstance(model, TrainableModel) else config or TrainConfig()
        self._config = replace(own, **changes)
        # A group of one has nothing to be compared with; 0 groups fail the check below.
        self._groups, rest = divmod(episodes_per_batch, group_size) if group_size >= 2 else (0, 0)
        if self._groups < 1 or rest:
            raise ConfigError(
                f"episodes_per_batch={episodes_per_batch} must be a multiple of group_size={group_size}, which must "
                "be 2 or more: episodes of one seed are compared with each other"
            )
        for name, value in (("max_episode_length", max_episode_length), ("parallel", parallel)):
            if value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        if seeds is not None and not seeds:
            raise ConfigError("seeds is empty; leave it out, or give at least one")
        self._group_size, self._max_steps, self._seeds = group_size, max_episode_length, seeds
        self._parallel, self._max_exceptions = parallel, max_exceptions
        self._begun = 0  # number of seeds used so far

    async def collect_episodes(self, seeds: Iterable[int] | None = None) -> list[TrajectoryGroup]:
        """Play episodes, many at the same time, with a progress bar; return a group of `group_size` episodes per seed.

        If more than `max_exceptions` episodes raise, the last one's exception is raised and the others are cancelled.

        Args:
            seeds: seeds for an evaluation, whose groups `model.log` takes. Without this argument the trainer plays its
                next training seeds, whose groups `update_policy` takes.
        """
        await self.agent.ready()
        chosen = self._next_seeds() if seeds is None else list(seeds)
        pool = EnvironmentPool(self._make, self._parallel)

        async def episode(seed: int) -> Trajectory:
            async with pool.one() as worker:
                return await play(worker, self.agent, seed, max_steps=self._max_steps)

        def group(seed: int) -> PendingGroup:
            # The seed names the scenario, so groups of one seed are the same scenario in every update.
            episodes = (episode(seed) for _ in range(self._group_size))
            return TrajectoryGroup(episodes, metadata={"scenario_id": f"seed {seed}"})

        try:
            return await gather_trajectory_groups(
                (group(seed) for seed in chosen),
                pbar_desc=f"episodes, update {self.updates}",
                max_exceptions=self._max_exceptions,
            )
        finally:
            await pool.close()

    async def update_policy(self, groups: Iterable[TrajectoryGroup]) -> TrainResult:
        """Train the agent's model on groups of episodes; result and errors are those of `TrainableModel.train`."""
        await self.agent.ready()
        result = await self._model().train(groups, self._config)
        self.updates += 1
        return result

    async def save_checkpoint(self, path: str | PathLike[str]) -> Path:
        """Write the counters and the champion's name, no weights, to a JSON file; return its path."""
        await self.agent.ready()
        champion = await self._model().runtime().champion()
        return write_checkpoint(path, Checkpoint(champion.name, self.updates, self._begun))

    async def load_checkpoint(self, path: str | PathLike[str]) -> None:
        """Promote the policy of a saved checkpoint and restore the counters; `ConfigError` if it is none."""
        await self.agent.ready()
        model = self._model()
        found = read_checkpoint(path, model=model.name)
        await model.runtime().promote(found.policy)
        # After the promotion: if it fails, the trainer stays where it was.
        self.updates, self._begun = found.updates, found.begun

    def _next_seeds(self) -> list[int]:
        numbers = range(self._begun, self._begun + self._groups)
        self._begun += self._groups
        return list(numbers) if self._seeds is None else [self._seeds[number % len(self._seeds)] for number in numbers]

    def _model(self) -> TrainableModel[Any]:
        model = self.agent.model
        if not isinstance(model, TrainableModel):
            raise ConfigError(f"{model.name} is a Model and only answers; give the agent a TrainableModel to train it")
        return model
