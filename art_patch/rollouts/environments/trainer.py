"""`GRPOTrainer`: seeds -> groups of episodes -> the next policy, which serves at once.

    trainer = art.GRPOTrainer(art.Agent(model), Maze, learning_rate=1e-4, episodes_per_batch=64)
    for _ in range(20):
        await trainer.update_policy(await trainer.collect_episodes())

An update is `TrainableModel.train`. Await the methods one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from art_patch._lib.atomic_files import replacing
from art_patch.errors import ConfigError
from art_patch.rollouts.environments.environment import Environment, EnvironmentPool, Make, maker_of
from art_patch.rollouts.environments.episode import Agent, play
from art_patch.rollouts.model import TrainableModel
from art_patch.rollouts.model_runtime import TrainResult
from art_patch.rollouts.trajectory import Trajectory
from art_patch.rollouts.trajectory_group import TrajectoryGroup, gather_trajectory_groups
from art_patch.training import TrainConfig


class GRPOTrainer:
    """Plays episodes with an agent and trains its model on them.

    Attributes:
        updates: number of updates made so far.
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
        """Prepare; `collect_episodes` plays.

        Args:
            agent: its model learns, and must be registered before episodes are played.
            environment: a class, or a function that makes environments; or one environment, which is copied. Episodes
                that run at once need one each.
            learning_rate: replaces that of `config`.
            batch_size: groups in one optimizer step; replaces that of `config`.
            episodes_per_batch: episodes that `collect_episodes` plays.
            max_episode_length: steps after which an episode ends.
            kl_penalty: replaces that of `config`.
            group_size: episodes of one seed, which are compared with each other.
            seeds: the scenarios, repeated after the last one; 0, 1, 2, ... without end unless given.
            config: all other settings of an update.
            parallel: episodes that run at once.
            max_exceptions: number of episodes in a batch that may raise, or their share if below 1.

        Raises:
            ConfigError: a number is out of its range, or the environment cannot be copied.
        """
        self.agent = agent
        self.updates = 0
        self._make = maker_of(environment)
        self._config = _config(config or TrainConfig(), learning_rate, batch_size, kl_penalty)
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
        self._group_size, self._max_steps = group_size, max_episode_length
        self._seeds = seeds
        self._parallel, self._max_exceptions = parallel, max_exceptions
        self._begun = 0

    async def collect_episodes(self, seeds: Iterable[int] | None = None) -> list[TrajectoryGroup]:
        """Play episodes, many at once, with a progress bar; return a group for each seed.

        Args:
            seeds: seeds for an evaluation, whose groups go to `model.log(groups)`. Unless given, the trainer's next
                seeds are played, and their groups go to `update_policy`.

        Raises:
            Exception: that of an environment, if more than `max_exceptions` raise; running episodes are cancelled.
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
                        # The seed names the scenario, so groups of one seed are the same scenario in every update.
                        (episode(seed) for _ in range(self._group_size)),
                        metadata={"scenario_id": f"seed {seed}"},
                    )
                    for seed in chosen
                ),
                pbar_desc=f"episodes, update {self.updates}",
                max_exceptions=self._max_exceptions,
            )
        finally:
            await pool.close()

    async def update_policy(self, groups: Iterable[TrajectoryGroup]) -> TrainResult:
        """Update the policy from episodes, as `TrainableModel.train` does, and with its errors."""
        result = await self._model().runtime().train(groups, self._config)
        self.updates += 1
        return result

    async def save_checkpoint(self, path: str | PathLike[str]) -> Path:
        """Write the state of the trainer and its model as a JSON file, and return its path.

        The file holds the policy's name and no weights. It is useful as long as the project's directory exists and
        `delete_checkpoints` has not deleted the policy.
        """
        champion = await self._model().runtime().champion()
        return write_checkpoint(path, Checkpoint(champion.name, self.updates, self._begun))

    async def load_checkpoint(self, path: str | PathLike[str]) -> None:
        """Go back to the state that `save_checkpoint` wrote: its policy is promoted; later policies are kept.

        Raises:
            ConfigError: the file is no checkpoint of this model.
            StoreError: the project has no such policy.
            TransitionError: the policy was rejected, by `delete_checkpoints` for example.
            EngineError: the engine cannot serve it.
        """
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


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a trainer."""

    policy: str  # the policy that served, `NAME@STEP`
    updates: int  # number of updates made
    begun: int  # number of seeds used so far


def write_checkpoint(path: str | PathLike[str], checkpoint: Checkpoint) -> Path:
    """Write a file for `read_checkpoint`, and its directory; return its path."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target, mode=0o666) as file:  # the file holds no secret, so the umask decides who may read it
        file.write(f"{json.dumps(asdict(checkpoint))}\n".encode())
    return target


def read_checkpoint(path: str | PathLike[str], *, model: str) -> Checkpoint:
    """Read a file of `write_checkpoint`; raises a `ConfigError` if it is missing, damaged or of another model."""
    try:
        found: Any = json.loads(Path(path).read_text())
        checkpoint = Checkpoint(str(found["policy"]), int(found["updates"]), int(found["begun"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no checkpoint ({error}); give a file that GRPOTrainer.save_checkpoint wrote"
        ) from error
    if checkpoint.policy.rpartition("@")[0] != model:
        raise ConfigError(f"{path} is of {checkpoint.policy}; {model} cannot go back to it")
    return checkpoint


def _config(
    config: TrainConfig, learning_rate: float | None, batch_size: int | None, kl_penalty: float | None
) -> TrainConfig:
    said: dict[str, Any] = {"learning_rate": learning_rate, "batch_size": batch_size, "kl_penalty": kl_penalty}
    return replace(config, **{name: value for name, value in said.items() if value is not None})
