"""`GRPOTrainer`: seeds -> groups of episodes -> the next policy, which serves at once.

    trainer = art.GRPOTrainer(art.Agent(model), Maze, learning_rate=1e-4, episodes_per_batch=64)
    for _ in range(20):
        await trainer.update_policy(await trainer.collect_episodes())

An update is `TrainableModel.train`. All methods are to be called one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from art_patch.errors import ConfigError
from art_patch.rollouts.environments import checkpoint as checkpoints
from art_patch.rollouts.environments.agent import Agent
from art_patch.rollouts.environments.checkpoint import Checkpoint
from art_patch.rollouts.environments.environment import Environment
from art_patch.rollouts.environments.environment_pool import EnvironmentPool, Make, maker_of
from art_patch.rollouts.environments.episode import play
from art_patch.rollouts.gather import gather_trajectory_groups
from art_patch.rollouts.model import TrainableModel, TrainResult
from art_patch.rollouts.trajectory import Trajectory
from art_patch.rollouts.trajectory_group import TrajectoryGroup
from art_patch.training import TrainConfig


class GRPOTrainer:
    """See the module.

    Attributes:
        updates: that were made so far.
    """

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
        """Begin nothing yet.

        Args:
            agent: whose model learns; the model has to be registered before episodes are played.
            environment: its class, or a function that makes one; or one, which is copied. Episodes that run at once
                need one each.
            learning_rate: in place of `config`'s.
            batch_size: groups that one optimizer step takes, in place of `config`'s.
            episodes_per_batch: episodes that `collect_episodes` plays.
            max_episode_length: steps after which an episode ends.
            kl_penalty: in place of `config`'s.
            group_size: episodes of one seed, which are compared with each other.
            seeds: of scenarios, gone through again and again; unless given 0, 1, 2 and so on, none of them twice.
            config: everything else about how updates are made.
            parallel: episodes that run at once.
            max_exceptions: how many episodes of a batch may raise; below 1, which share of them.

        Raises:
            ConfigError: a number makes no sense, or the environment cannot be copied.
        """
        self.agent = agent
        self.updates = 0
        self._make = maker_of(environment)
        self._config = _config(config or TrainConfig(), learning_rate, batch_size, kl_penalty)
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
        self._group_size, self._max_steps = group_size, max_episode_length
        self._seeds = seeds
        self._parallel, self._max_exceptions = parallel, max_exceptions
        self._begun = 0

    async def collect_episodes(self, seeds: Iterable[int] | None = None) -> list[TrajectoryGroup]:
        """Play episodes, many at once, with a bar that shows how far they are; return a group for each seed.

        Args:
            seeds: of episodes to look at, which the trainer's own do not move on for: give the groups to
                `model.log(groups)`. Unless given the trainer's next ones.

        Raises:
            Exception: of an environment, if there is one more than `max_exceptions`; what still runs is cancelled.
        """
        chosen = self._next_seeds() if seeds is None else list(seeds)
        pool = EnvironmentPool(self._make, self._parallel)

        async def episode(seed: int) -> Trajectory:
            async with pool.one() as worker:
                return await play(worker, self.agent, seed, max_steps=self._max_steps)

        try:
            return await gather_trajectory_groups(
                (
                    TrajectoryGroup(
                        (episode(seed) for _ in range(self._group_size)), metadata={"scenario_id": f"seed {seed}"}
                    )
                    for seed in chosen
                ),
                pbar_desc=f"episodes, update {self.updates}",
                max_exceptions=self._max_exceptions,
            )
        finally:
            await pool.close()

    async def update_policy(self, groups: Iterable[TrajectoryGroup]) -> TrainResult:
        """Learn from episodes; see `TrainableModel.train`, whose errors are raised."""
        result = await self._model().train(groups, self._config)
        self.updates += 1
        return result

    async def save_checkpoint(self, path: str | PathLike[str]) -> Path:
        """Write where the trainer and its model stand, and return the file; see `checkpoint`."""
        model = self._model()
        policy = model.get_inference_name(await model.get_step())
        return checkpoints.write(path, Checkpoint(policy, self.updates, self._begun))

    async def load_checkpoint(self, path: str | PathLike[str]) -> None:
        """Go back to where `save_checkpoint` was called: its policy is promoted and serves; later ones are kept.

        Raises:
            ConfigError: the file is no checkpoint of this model.
            StoreError: the project has no such policy.
            TransitionError: the policy was given up, by `delete_checkpoints` for example.
            EngineError: the engine cannot serve it.
        """
        model = self._model()
        found = checkpoints.read(path, model=model.name)
        await model.backend().promote(model, found.policy)
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


def _config(
    config: TrainConfig, learning_rate: float | None, batch_size: int | None, kl_penalty: float | None
) -> TrainConfig:
    said: dict[str, Any] = {"learning_rate": learning_rate, "batch_size": batch_size, "kl_penalty": kl_penalty}
    return replace(config, **{name: value for name, value in said.items() if value is not None})
