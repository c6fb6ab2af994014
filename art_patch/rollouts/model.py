"""The models that a training script uses: a `Model` answers requests, a `TrainableModel` is trained as well.

`register` binds a model to a backend. From then on the client of a `TrainableModel` sends requests to the champion, and
`train` makes and promotes the next policy while requests go on. Methods that need the project (`train`, `log`, ...)
call the `ModelRuntime` that the backend binds to the model.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

from pydantic import BaseModel, ConfigDict, PrivateAttr

from art_patch.errors import ConfigError
from art_patch.rollouts.client import Lane, ModelClient
from art_patch.rollouts.model_runtime import ModelRuntime, TrainResult, history, not_registered
from art_patch.rollouts.trajectory import Trajectory
from art_patch.rollouts.trajectory_group import TrajectoryGroup
from art_patch.training import TrainConfig
from art_patch.types import Policy

ConfigT = TypeVar("ConfigT")

# Settings of OpenPipe ART's own trainer that change the memory it needs and not the update.
_ONLY_MEMORY = frozenset({"logprob_calculation_chunk_size"})


class Backend(Protocol):
    """What a model is registered with: it trains and serves models, as `LocalBackend` does on this machine."""

    async def register(self, model: Model[Any]) -> None:
        """Open the model's store, start its engine if it is trained, and bind a `ModelRuntime` to the model."""

    async def promote(self, model: TrainableModel[Any], policy: str) -> Policy:
        """Make the policy `NAME@STEP` of the model the champion, and return it."""
        ...

    def close(self) -> None:
        """End every engine and trainer process that the backend started."""


class Model(BaseModel, Generic[ConfigT]):
    """A model that answers requests and is never trained, such as a prompted model to compare with.

    Attributes:
        name: name of the model, which scripts use in requests.
        project: name of the project whose store keeps the model's rollouts and history.
        config: any value that the script wants to keep with the model; it is not used here.
        inference_base_url: address of the OpenAI-compatible server that answers, ending in `/v1`.
        inference_api_key: API key for that server; without it `"none"` is sent.
        inference_model_name: name of the model at that server; without it `name` is sent.
    """

    model_config = ConfigDict(extra="forbid")
    trainable: ClassVar[bool] = False

    name: str
    project: str
    config: ConfigT = cast("Any", None)
    inference_base_url: str | None = None
    inference_api_key: str | None = None
    inference_model_name: str | None = None

    _backend: Backend | None = PrivateAttr(None)
    _runtime: ModelRuntime | None = PrivateAttr(None)
    _client: ModelClient | None = PrivateAttr(None)
    _loop: asyncio.AbstractEventLoop | None = PrivateAttr(None)  # the loop that the client's connections belong to

    def backend(self) -> Backend:
        """Return the backend that the model is registered with; raises a `ConfigError` if it is not registered."""
        if self._backend is None:
            raise not_registered(self.name)
        return self._backend

    async def register(self, backend: Backend) -> None:
        """Register the model with a backend, which opens the store of the model's project."""
        self._backend = backend
        await backend.register(self)

    def bind(self, runtime: ModelRuntime) -> None:
        """Set the runtime on which the model's methods work; the backend calls this in `register`."""
        self._runtime = runtime

    def runtime(self) -> ModelRuntime:
        """Return the model's store, engine and trainer; raises a `ConfigError` if the model is not registered."""
        if self._runtime is None:
            raise not_registered(self.name)
        return self._runtime

    def openai_client(self) -> ModelClient:
        """Return the client of this event loop, an `AsyncOpenAI` that keeps the exact tokens of the answers."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # made before the loop in which it will be used
            loop = None
        # Connections belong to the loop that opened them, so a second `asyncio.run` needs a second client.
        if self._client is None or (self._loop is not None and loop is not None and loop is not self._loop):
            lane = Lane(self.name, self.get_inference_name, self._policy_changed)
            key = self.inference_api_key or "none"
            self._client = ModelClient(lane=lane, base_url=self._address(), api_key=key)
        # A client that was made before its loop belongs to the first loop that asks for it.
        self._loop = loop or self._loop
        return self._client

    def get_inference_name(self, step: int | None = None) -> str:
        """Return the model name that the server expects in requests; raises a `ConfigError` if `step` is given."""
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
        """Store rollouts that are never trained on, and write their mean metrics as one line of the history.

        Args:
            trajectories: trajectories, exceptions or groups; exceptions count in the metric `exception_rate`.
            split: prefix of the metrics in the history, such as `val` or `test`.
            metrics: additional metrics for the same line.
        """
        # A trajectory without a group becomes a group of its own, because it may have no siblings.
        groups = [each if isinstance(each, TrajectoryGroup) else TrajectoryGroup([each]) for each in trajectories]
        await self.runtime().log(groups, split, dict(metrics or {}))

    async def _policy_changed(self) -> bool:
        """Look up the policy that serves; return whether asking again may help."""
        return False

    def _address(self) -> str:
        if self.inference_base_url is not None:
            return self.inference_base_url
        if self.trainable:
            raise not_registered(self.name)
        raise ConfigError(f"nothing says where {self.name} is; give Model(..., inference_base_url=...)")


class TrainableModel(Model[ConfigT], Generic[ConfigT]):
    """A model that is trained. `base_model`, a directory or Hugging Face id, is its policy of step 0."""

    trainable: ClassVar[bool] = True

    base_model: str
    _internal_config: Any = PrivateAttr(None)  # scripts for OpenPipe ART set it

    def __init__(
        self,
        *,
        name: str,
        project: str,
        base_model: str,
        config: ConfigT = cast("Any", None),  # noqa: B008
        _internal_config: Any = None,
        **more: Any,
    ) -> None:
        # `base_model` and `more` are fields of this class and its subclasses, which the parent's signature lacks.
        fields: dict[str, Any] = {"name": name, "project": project, "config": config, "base_model": base_model, **more}
        super().__init__(**fields)
        self._internal_config = _internal_config
        self._refuse_internal_config()

    async def register(self, backend: Backend) -> None:
        """Register the model with a backend; in a new project the base model becomes champion, as step 0.

        A project of another model or base raises a `ConfigError`, an engine that does not start an `EngineError`.
        """
        self._refuse_internal_config()  # once more: scripts also set it after the model is made
        await super().register(backend)

    def get_inference_name(self, step: int | None = None) -> str:
        """Return the policy name of a step, `NAME@STEP`; without `step`, the name of the champion."""
        if step is not None:
            return f"{self.name}@{step}"
        return (self._runtime and self._runtime.serves) or self.name

    async def get_step(self) -> int:
        """Return the step of the champion; 0 is the base model."""
        return (await self.runtime().champion()).step

    async def train(
        self,
        trajectory_groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        _config: Mapping[str, Any] | None = None,
        verbose: bool = False,
        eval_groups: Iterable[TrajectoryGroup] = (),
    ) -> TrainResult:
        """Train the next policy on groups of rollouts, and promote it; requests to the model go on meanwhile.

        Args:
            trajectory_groups: groups of rollouts, with a reward on each trajectory to learn from.
            config: settings of the update; `None` uses the defaults of `TrainConfig`.
            _config: settings of OpenPipe ART's trainer. Those that only limit its memory are ignored with a warning;
                any other raises a `ConfigError`.
            verbose: true prints a line to stderr for each optimizer step.
            eval_groups: groups that are evaluated every `config.eval_steps` optimizer steps and never trained on.

        Raises:
            ConfigError: no trajectory has a reward, or no choice carries exact tokens; or only one of `eval_groups` and
                `eval_steps` is given.
            Busy: a cycle or another update is running on the project.
            TrainingError: the update failed; no policy was published, and the champion stays the same.
            EngineError: the engine cannot serve the new policy; the champion stays the same.
        """
        _refuse(_config)
        return await self.runtime().train(trajectory_groups, config, verbose=verbose, eval_groups=eval_groups)

    async def checkpoint(self, step: int) -> Model[ConfigT]:
        """Return the policy of a step as a `Model`, and make the engine serve it beside the champion.

        The engine serves it until the next promotion, which unloads all policies but the champion and the two kept for
        rollback. Raises a `NotFound` if there is no such policy, an `EngineError` if the engine cannot serve it.
        """
        name = self.get_inference_name(step)
        await self.runtime().ensure(name)
        served_at = {"inference_base_url": self.inference_base_url, "inference_api_key": self.inference_api_key}
        return Model(name=name, project=self.project, config=self.config, **served_at)

    async def history(self, metric: str) -> list[tuple[int, float]]:
        """Return a (step, mean value) pair for each step at which a metric such as `val/reward` was logged, by step."""
        return history(self.runtime().directory, metric)

    async def delete_checkpoints(self, best_checkpoint_metric: str = "val/reward") -> list[str]:
        """Delete the files of all former champions except the best policy, and return the deleted policies' names.

        The best policy is the one with the highest mean of `best_checkpoint_metric` in the history, among the champion
        and the former champions. A deleted policy is rejected in the ledger, so it can never be promoted again.
        """
        return await self.runtime().delete_checkpoints(best_checkpoint_metric)

    async def _policy_changed(self) -> bool:
        await self.get_step()
        return True

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
