"""Models as a script names them: one that is only asked, and one that learns.

`TrainableModel` is bound to a backend by `register`; from then on its client reaches the policy that serves, and
`train` makes the next one, while requests go on. Fields and methods are those of OpenPipe ART.
"""

from __future__ import annotations

import asyncio
import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from pydantic import BaseModel, ConfigDict, PrivateAttr

from art_patch.errors import ConfigError
from art_patch.rollouts.client import Lane, ModelClient
from art_patch.rollouts.trajectory import Trajectory
from art_patch.rollouts.trajectory_group import TrajectoryGroup
from art_patch.training import TrainConfig

if TYPE_CHECKING:
    from art_patch.rollouts.backend import LocalBackend

ConfigT = TypeVar("ConfigT")

_ONLY_MEMORY = frozenset({"logprob_calculation_chunk_size"})
"""Settings of OpenPipe ART's own trainer that change what it needs, and nothing of what it learns."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What `train` came to.

    Attributes:
        step: of the policy that serves now.
        metrics: metrics of the update and of its groups; without those of an update if nothing was learned.
        checkpoint_path: directory of its adapter; `None` for the base model.
        reason: why nothing was learned, and the same policy serves on; empty if something was.
    """

    step: int
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    checkpoint_path: str | None = None
    reason: str = ""


class Model(BaseModel, Generic[ConfigT]):
    """A model that is asked: a prompted one, to compare with.

    Attributes:
        name: of the model; what requests call it.
        project: that it belongs to.
        config: anything of the script's own.
        inference_base_url: OpenAI-compatible address.
        inference_api_key: key for it.
        inference_model_name: what the server calls it; `name` unless given.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    project: str
    config: ConfigT = cast(Any, None)
    inference_base_url: str | None = None
    inference_api_key: str | None = None
    inference_model_name: str | None = None

    _backend: LocalBackend | None = PrivateAttr(None)
    _client: ModelClient | None = PrivateAttr(None)
    _loop: asyncio.AbstractEventLoop | None = PrivateAttr(None)  # that the client's connections are open on

    @property
    def trainable(self) -> bool:
        """Whether it learns."""
        return False

    def backend(self) -> LocalBackend:
        """Return the backend that it is registered with.

        Raises:
            ConfigError: with none.
        """
        if self._backend is None:
            raise ConfigError(f"{self.name} is not registered; call `await model.register(backend)` first")
        return self._backend

    async def register(self, backend: LocalBackend) -> None:
        """Bind the model to a backend."""
        self._backend = backend
        await backend.register(self)

    def openai_client(self) -> ModelClient:
        """Return the model's own client, an `AsyncOpenAI`; the same one each time, on one event loop.

        Raises:
            ConfigError: nothing says where the model is.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # made beforehand, for the loop that will ask
            loop = None
        if self._client is None or (self._loop is not None and loop is not None and loop is not self._loop):
            key = self.inference_api_key or "none"
            self._client = ModelClient(lane=self._lane(), base_url=self._address(), api_key=key)
        self._loop = loop or self._loop
        return self._client

    def get_inference_name(self, step: int | None = None) -> str:
        """Return what requests call the model.

        Args:
            step: of a policy, for a model that learns; that which serves unless given.
        """
        if step is not None:
            raise ConfigError(f"{self.name} is not trained here and has no steps; leave step out")
        return self.inference_model_name or self.name

    async def log(
        self,
        trajectories: Iterable[Trajectory | BaseException] | Iterable[TrajectoryGroup] = (),
        split: str = "val",
        *,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Keep rollouts that are not trained on, and what they came to as a line of the history.

        Args:
            trajectories: or groups.
            split: what they are of.
            metrics: further metrics.
        """
        await self.backend().log(self, groups_of(trajectories), split, dict(metrics or {}))

    def _lane(self) -> Lane:
        own, theirs = self.name, self.get_inference_name()
        return Lane(policy=lambda name: theirs if name == own else name)

    def _address(self) -> str:
        if self.inference_base_url is None:
            raise ConfigError(f"nothing says where {self.name} is; give Model(..., inference_base_url=...)")
        return self.inference_base_url


class TrainableModel(Model[ConfigT], Generic[ConfigT]):
    """A model that learns.

    Attributes:
        base_model: model directory or Hugging Face id.
    """

    base_model: str

    _serves: str | None = PrivateAttr(None)
    _internal_config: Any = PrivateAttr(None)  # scripts for OpenPipe ART set it

    def __init__(
        self,
        *,
        name: str,
        project: str,
        base_model: str,
        config: ConfigT = cast(Any, None),  # noqa: B008
        _internal_config: Any = None,
        **more: Any,
    ) -> None:
        """Take the fields by name.

        Args:
            name: see `Model`.
            project: see `Model`.
            base_model: see the class.
            config: see `Model`.
            _internal_config: of OpenPipe ART's engine; refused.
            more: what a class of the script's own has besides.

        Raises:
            ConfigError: `_internal_config` is given.
        """
        # `base_model` and `more` are fields of this class and of its heirs, which the parent's signature does not know.
        fields: dict[str, Any] = {"name": name, "project": project, "config": config, "base_model": base_model, **more}
        super().__init__(**fields)
        self._internal_config = _internal_config
        self._refuse_internal_config()

    @property
    def trainable(self) -> bool:
        """Whether it learns."""
        return True

    async def register(self, backend: LocalBackend) -> None:
        """Bind the model to a backend, which joins its engine or starts one; the base model serves as step 0.

        Raises:
            ConfigError: its project serves another model.
            EngineError: the engine does not start.
        """
        self._refuse_internal_config()
        await super().register(backend)

    def get_inference_name(self, step: int | None = None) -> str:
        """Return the policy that requests reach: `NAME@STEP`.

        Args:
            step: of a policy; that which serves unless given.
        """
        if step is not None:
            return f"{self.name}@{step}"
        return self._serves or self.name

    async def get_step(self) -> int:
        """Return the step of the policy that serves; 0 is the base model."""
        champion = await self.backend().champion(self)
        return champion.step

    async def train(
        self,
        trajectory_groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        _config: Mapping[str, Any] | None = None,
        verbose: bool = False,
        eval_groups: Iterable[TrajectoryGroup] = (),
    ) -> TrainResult:
        """Learn from groups, and let what was learned serve; requests are answered all the while.

        Args:
            trajectory_groups: rollouts with their rewards.
            config: how.
            _config: settings of OpenPipe ART's trainer; refused, but for one that only changes what memory it takes.
            verbose: print a line for each optimizer step.
            eval_groups: are evaluated on every `config.eval_steps` steps, and never learned from.

        Raises:
            ConfigError: nothing that is given can be learned from: no reward, or no exact tokens; or there is one of
                `eval_groups` and `eval_steps` without the other.
            Busy: a cycle, or another update, is at work on the project.
            TrainingError: the update failed; nothing was published, and the same policy serves.
            EngineError: the engine cannot serve what was learned; the same policy serves.
        """
        _refuse(_config)
        groups = list(trajectory_groups)
        return await self.backend().train(
            self, groups, config or TrainConfig(), verbose=verbose, evaluation=list(eval_groups)
        )

    async def checkpoint(self, step: int) -> Model[ConfigT]:
        """Return the policy of a step as a model to ask, and let the engine serve it: to evaluate it, to play with it.

        The engine forgets it with an update after two more, unless it serves.

        Args:
            step: of the policy; 0 is the base model.

        Raises:
            StoreError: there is no such policy.
            EngineError: the engine cannot serve it.
        """
        name = self.get_inference_name(step)
        await self.backend().ensure(self, name)
        return Model(
            name=name,
            project=self.project,
            config=self.config,
            inference_base_url=self.inference_base_url,
            inference_api_key=self.inference_api_key,
        )

    async def history(self, metric: str) -> list[tuple[int, float]]:
        """Return what a metric was at each step, in order; the mean where a step has several.

        Args:
            metric: with its split: `val/reward`, `train/loss`.
        """
        return await self.backend().history(self, metric)

    async def delete_checkpoints(self, best_checkpoint_metric: str = "val/reward") -> list[str]:
        """Delete every policy but the latest, the base and the best, and return the names of those that are gone.

        They can neither serve nor be rolled back to any more.

        Args:
            best_checkpoint_metric: metric of the history that says which is the best.
        """
        return await self.backend().delete_checkpoints(self, best_checkpoint_metric)

    def now_serves(self, policy: str) -> None:
        """Let requests go to this policy."""
        self._serves = policy

    def _lane(self) -> Lane:
        async def refresh() -> None:
            await self.get_step()

        return Lane(policy=self._policy, refresh=refresh)

    def _policy(self, name: str) -> str:
        return self.get_inference_name() if name == self.name else name

    def _address(self) -> str:
        if self.inference_base_url is None:
            raise ConfigError(f"{self.name} is not registered; call `await model.register(backend)` first")
        return self.inference_base_url

    def _refuse_internal_config(self) -> None:
        if self._internal_config is not None:
            raise ConfigError(
                "_internal_config is for OpenPipe ART's own engine; leave it out, and say the like with "
                "LocalBackend(max_model_len=..., gpu_memory_utilization=..., tensor_parallel_size=...)"
            )


def groups_of(
    trajectories: Iterable[Trajectory | BaseException] | Iterable[TrajectoryGroup],
) -> list[TrajectoryGroup]:
    """Return groups as they are; trajectories as a group each, because nothing says that they are siblings."""
    return [each if isinstance(each, TrajectoryGroup) else TrajectoryGroup([each]) for each in trajectories]


def has_reward(group: TrajectoryGroup) -> bool:
    """Whether any of the rollouts has a reward."""
    return any(math.isfinite(trajectory.reward) for trajectory in group)


def _refuse(config: Mapping[str, Any] | None) -> None:
    given = set(config or ())
    if unknown := sorted(given - _ONLY_MEMORY):
        raise ConfigError(f"_config {', '.join(unknown)}: is for OpenPipe ART's own trainer; say it with TrainConfig")
    for name in sorted(given):
        warnings.warn(
            f"_config[{name!r}] bounds the memory of OpenPipe ART's trainer and is not used; here "
            "TrainConfig(micro_batch_tokens=...) does",
            stacklevel=3,
        )
