"""The models of a script: `Model` answers requests, `TrainableModel` also learns.

`register` binds a model to a backend. From then on the client of a `TrainableModel` reaches the policy that serves, and
`train` makes the next policy while requests go on. Fields and methods are those of OpenPipe ART. The work of the
methods that need the project (`train`, `log`, ...) is in the `ModelRuntime` that the backend binds to the model.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar, cast

from pydantic import BaseModel, ConfigDict, PrivateAttr

from art_patch.errors import ConfigError
from art_patch.rollouts.client import Lane, ModelClient
from art_patch.rollouts.model_runtime import ModelRuntime, TrainResult
from art_patch.rollouts.records import history
from art_patch.rollouts.trajectory import Trajectory
from art_patch.rollouts.trajectory_group import TrajectoryGroup
from art_patch.training import TrainConfig
from art_patch.types import Policy

ConfigT = TypeVar("ConfigT")

# Settings of OpenPipe ART's own trainer that change the memory it needs and not the update.
_ONLY_MEMORY = frozenset({"logprob_calculation_chunk_size"})


class Backend(Protocol):
    """The place where models are trained and served, such as `LocalBackend`."""

    async def register(self, model: Model[Any]) -> None:
        """Make a model ready for requests and bind a `ModelRuntime` to it."""
        ...

    async def promote(self, model: TrainableModel[Any], policy: str) -> Policy:
        """Let a policy of the model serve, and return it."""
        ...

    def close(self) -> None:
        """End every process that was started for the models."""
        ...


class Model(BaseModel, Generic[ConfigT]):
    """A model that only answers, such as a prompted model to compare with.

    Attributes:
        name: its name in requests.
        project: the project that keeps its rollouts and their history.
        config: any value of the script's own.
        inference_base_url: OpenAI-compatible address, ending in `/v1`.
        inference_api_key: key for that address; `"none"` is sent unless given.
        inference_model_name: the server's name of the model; `name` unless given.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    project: str
    config: ConfigT = cast(Any, None)
    inference_base_url: str | None = None
    inference_api_key: str | None = None
    inference_model_name: str | None = None

    _backend: Backend | None = PrivateAttr(None)
    _runtime: ModelRuntime | None = PrivateAttr(None)
    _client: ModelClient | None = PrivateAttr(None)
    _loop: asyncio.AbstractEventLoop | None = PrivateAttr(None)  # the loop that the client's connections belong to

    @property
    def trainable(self) -> bool:
        """Whether the model learns."""
        return False

    def backend(self) -> Backend:
        """Return the backend that the model is registered with; raises a `ConfigError` if there is none."""
        if self._backend is None:
            raise self._not_registered()
        return self._backend

    async def register(self, backend: Backend) -> None:
        """Bind the model to a backend."""
        self._backend = backend
        await backend.register(self)

    def bind(self, runtime: ModelRuntime) -> None:
        """Take the runtime that the model's methods use; the backend calls this."""
        self._runtime = runtime

    def runtime(self) -> ModelRuntime:
        """Return the model's store, engine and trainer; raises a `ConfigError` if it is not registered."""
        if self._runtime is None:
            raise self._not_registered()
        return self._runtime

    def openai_client(self) -> ModelClient:
        """Return the model's own client, an `AsyncOpenAI`: on one event loop, always the same object."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # made before the loop in which it will be used
            loop = None
        # Connections belong to the loop that opened them, so a second `asyncio.run` needs a second client.
        if self._client is None or (self._loop is not None and loop is not None and loop is not self._loop):
            key = self.inference_api_key or "none"
            lane = Lane(self.name, self.get_inference_name, self._policy_changed)
            self._client = ModelClient(lane=lane, base_url=self._address(), api_key=key)
        # A client that was made before its loop belongs to the first loop that asks for it.
        self._loop = loop or self._loop
        return self._client

    def get_inference_name(self, step: int | None = None) -> str:
        """Return the name that requests send; `step` is for models that learn."""
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
        """Store rollouts that are not trained on, and write their mean metrics as a line of the history.

        Args:
            trajectories: trajectories or groups; exceptions are counted in the metric `exception_rate`.
            split: prefix of the metrics in the history, such as `val` or `test`.
            metrics: more metrics for the same line.
        """
        # A trajectory without a group becomes a group of its own, because it may have no siblings.
        groups = [each if isinstance(each, TrajectoryGroup) else TrajectoryGroup([each]) for each in trajectories]
        await self.runtime().log(groups, split, dict(metrics or {}))

    def _not_registered(self) -> ConfigError:
        return ConfigError(f"{self.name} is not registered; call `await model.register(backend)` first")

    async def _policy_changed(self) -> bool:
        """Look up the policy that serves; return whether asking again may help."""
        return False

    def _address(self) -> str:
        if self.inference_base_url is None:
            raise ConfigError(f"nothing says where {self.name} is; give Model(..., inference_base_url=...)")
        return self.inference_base_url


class TrainableModel(Model[ConfigT], Generic[ConfigT]):
    """A model that learns; its policy of step 0 is the base model."""

    base_model: str
    """Model directory or Hugging Face id."""

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
        """Take the fields by name; `more` are the fields of a subclass.

        Raises:
            ConfigError: `_internal_config` is given, which is for OpenPipe ART's own engine.
        """
        # `base_model` and `more` are fields of this class and its subclasses, which the parent's signature lacks.
        fields: dict[str, Any] = {"name": name, "project": project, "config": config, "base_model": base_model, **more}
        super().__init__(**fields)
        self._internal_config = _internal_config
        self._refuse_internal_config()

    @property
    def trainable(self) -> bool:
        """Whether the model learns."""
        return True

    async def register(self, backend: Backend) -> None:
        """Bind the model to a backend, which joins its engine or starts one; the base model serves as step 0.

        Raises:
            ConfigError: the project serves another model.
            EngineError: the engine does not start.
        """
        self._refuse_internal_config()  # once more: scripts also set it after the model is made
        await super().register(backend)

    def get_inference_name(self, step: int | None = None) -> str:
        """Return the name of a step's policy, `NAME@STEP`; without `step`, of the policy that serves."""
        if step is not None:
            return f"{self.name}@{step}"
        return (self._runtime and self._runtime.serves) or self.name

    async def get_step(self) -> int:
        """Return the step of the policy that serves; 0 is the base model."""
        return (await self.runtime().champion()).step

    async def train(
        self,
        trajectory_groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        _config: Mapping[str, Any] | None = None,
        verbose: bool = False,
        eval_groups: Iterable[TrajectoryGroup] = (),
    ) -> TrainResult:
        """Update the policy from groups of rollouts, and let the new policy serve; requests go on meanwhile.

        Args:
            trajectory_groups: rollouts with their rewards.
            config: settings of the update; `TrainConfig()` unless given.
            _config: settings of OpenPipe ART's trainer; refused, unless they only change the memory that it needs.
            verbose: print a line for each optimizer step.
            eval_groups: evaluated every `config.eval_steps` optimizer steps and never learned from.

        Raises:
            ConfigError: no trajectory has a reward, or no choice carries exact tokens; or only one of `eval_groups` and
                `eval_steps` is given.
            Busy: a cycle or another update is at work on the project.
            TrainingError: the update failed; nothing was published, and the same policy serves.
            EngineError: the engine cannot serve the new policy; the same policy serves as before.
        """
        _refuse(_config)
        return await self.runtime().train(trajectory_groups, config, verbose=verbose, eval_groups=eval_groups)

    async def checkpoint(self, step: int) -> Model[ConfigT]:
        """Return the policy of a step as a `Model`, and let the engine serve it beside the champion.

        It stays loaded until a promotion unloads all policies but the champion and the two kept for rollback. Raises a
        `StoreError` if there is no such policy, an `EngineError` if the engine cannot serve it.
        """
        name = self.get_inference_name(step)
        await self.runtime().ensure(name)
        return Model(
            name=name,
            project=self.project,
            config=self.config,
            inference_base_url=self.inference_base_url,
            inference_api_key=self.inference_api_key,
        )

    async def history(self, metric: str) -> list[tuple[int, float]]:
        """Return (step, mean value) of a metric such as `val/reward` or `train/loss`, by step."""
        return history(self.runtime().directory, metric)

    async def delete_checkpoints(self, best_checkpoint_metric: str = "val/reward") -> list[str]:
        """Delete every policy but the base, the serving one and the best; return the names of the deleted policies.

        The best policy has the highest mean of `best_checkpoint_metric` in the history. A deleted policy can neither
        serve nor be promoted again.
        """
        return await self.runtime().delete_checkpoints(best_checkpoint_metric)

    async def _policy_changed(self) -> bool:
        await self.get_step()
        return True

    def _address(self) -> str:
        if self.inference_base_url is None:
            raise self._not_registered()
        return self.inference_base_url

    def _refuse_internal_config(self) -> None:
        if self._internal_config is not None:
            raise ConfigError(
                "_internal_config is for OpenPipe ART's own engine; leave it out, and say the like with "
                "LocalBackend(max_model_len=..., gpu_memory_utilization=..., tensor_parallel_size=...)"
            )


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
