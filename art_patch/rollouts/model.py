"""The models that a training script uses: a `Model` answers requests, a `TrainableModel` is trained as well.

`register` binds a model to a backend. From then on the client of a `TrainableModel` sends requests to the champion, and
`train` makes and promotes the next policy while requests go on. Methods that need the project (`train`, `log`, ...)
call the `ModelRuntime` that the backend binds to the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar, Unpack, cast

from openai.types.chat import ChatCompletion, ChatCompletionMessageToolCallUnion
from pydantic import BaseModel, ConfigDict, PrivateAttr, model_validator

from art_patch.errors import ConfigError
from art_patch.rollouts.client import Lane, ModelClient
from art_patch.rollouts.forms import (
    InternalConfig,
    TrainSettings,
    as_groups,
    internal_config,
    model_fields,
    rollouts_in,
    train_config,
)
from art_patch.rollouts.history import check_log, history, merge_state, read_state, write_state
from art_patch.rollouts.model_runtime import ModelRuntime, TrainResult, not_registered
from art_patch.rollouts.sft import TrainSFTConfig, train_sft
from art_patch.rollouts.trajectory import Trajectory
from art_patch.rollouts.trajectory_group import TrajectoryGroup
from art_patch.training import TrainConfig
from art_patch.types import Policy

ConfigT = TypeVar("ConfigT")


class Completion(ChatCompletion):
    """An answer of `create_completion`: the SDK's, with the first choice's text and tool calls at hand."""

    @property
    def content(self) -> str | None:
        """The text of the first choice."""
        return self.choices[0].message.content

    @property
    def tool_calls(self) -> list[ChatCompletionMessageToolCallUnion] | None:
        """The tool calls of the first choice."""
        return self.choices[0].message.tool_calls


class Backend(Protocol):
    """What a model is registered with: it trains and serves models, as `LocalBackend` does on this machine."""

    async def register(self, model: Model[Any]) -> None:
        """Open the model's store, start its engine if it is trained, and bind a `ModelRuntime` to the model."""

    async def train(
        self, model: TrainableModel[Any], trajectory_groups: Iterable[TrajectoryGroup | Trajectory], **settings: Any
    ) -> TrainResult:
        """Train the model's next policy, and serve it."""
        ...

    async def promote(self, model: TrainableModel[Any], policy: str) -> Policy:
        """Make the policy `NAME@STEP` of the model the champion, and return it."""
        ...

    def close(self) -> object:
        """End every engine and trainer process that the backend started."""


class Model(BaseModel, Generic[ConfigT]):
    """A model that answers requests and is never trained, such as a prompted model to compare with.

    Attributes:
        name: name of the model, which scripts use in requests.
        project: name of the project whose store keeps the model's rollouts and history.
        config: any value that the script wants to keep with the model. A `TrainConfig` in a `TrainableModel` is what
            its updates use; anything else is not used here.
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

    @model_validator(mode="before")
    @classmethod
    def _refuse_absent(cls, given: Any) -> Any:
        return model_fields(cast("Mapping[str, Any]", given)) if isinstance(given, Mapping) else given

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

    async def get_step(self) -> int:
        """Return the step of the champion; 0 is the base model, and the step of a model that is not trained."""
        return 0

    def litellm_completion_params(self, step: int | None = None) -> dict[str, Any]:
        """Return the arguments by which `litellm.completion` asks the model, or the policy of a step.

        Its answers carry no exact tokens, so they are not trained on.
        """
        name = self.get_inference_name(step)
        model = f"hosted_vllm/{name}" if self.trainable else name
        key = self.inference_api_key or "none"
        return {"model": model, "base_url": self._address(), "api_key": key, "temperature": 1}

    async def create_completion(
        self,
        asked: Trajectory | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **params: Any,
    ) -> Completion:
        """Ask the model to continue a trajectory or messages; a trajectory gets the first choice appended.

        Args:
            asked: a trajectory, or the messages of a request.
            tools: tools to offer; a trajectory offers them from this request on, and without them its own.
            params: settings of the request: `temperature`, `max_tokens`, ...

        Raises:
            ConfigError: `params` asks for a stream, which this call cannot return.
        """
        if params.get("stream"):
            raise ConfigError("create_completion returns whole answers; leave stream=True out")
        trajectory = asked if isinstance(asked, Trajectory) else None
        if trajectory is not None:
            if tools is not None:
                trajectory.tools = cast("Any", list(tools))
            tools = cast("Any", trajectory.tools)
        if tools:
            params["tools"] = list(tools)
        messages = asked.messages() if isinstance(asked, Trajectory) else list(asked)
        answer: Any = await self.openai_client().chat.completions.create(
            model=self.name, messages=cast("Any", messages), **params
        )
        if trajectory is not None:
            trajectory.messages_and_choices.append(answer.choices[0])
        # The same choices and not copies of them: the exact tokens hang on each.
        return Completion.model_construct(answer.model_fields_set, **dict(answer))

    async def log(
        self,
        trajectories: Iterable[Trajectory | BaseException | TrajectoryGroup] | None = (),
        split: str = "val",
        *,
        metrics: Mapping[str, float] | None = None,
        step: int | None = None,
    ) -> None:
        """Store rollouts that are not trained on, and write their mean metrics as one line of the history.

        Groups of the split `train` may still be trained on afterwards, and are stored once.

        Args:
            trajectories: trajectories, exceptions or groups; exceptions count in the metric `exception_rate`. A
                trajectory without a group stands alone, and is stored anew each time.
            split: prefix of the metrics in the history, such as `train`, `val` or `test`.
            metrics: additional metrics for the same line.
            step: step of the line; without it the champion's.

        Raises a `ConfigError`, and stores nothing, if a reward or metric is no number, a step no whole number from 0
        on, or a split no text.
        """
        numbers = check_log(split, step, metrics)
        # A trajectory without a group becomes a group of its own, because it may have no siblings.
        given = rollouts_in(trajectories)
        groups = [each if isinstance(each, TrajectoryGroup) else TrajectoryGroup([each]) for each in given]
        await self.runtime().log(groups, split, numbers, None if step is None else int(step))

    def read_state(self) -> dict[str, Any] | None:
        """Return what the script has kept with `merge_state` or `overwrite_state`; `None` before that."""
        return read_state(self.runtime().directory, None if self.trainable else self.name)

    def overwrite_state(self, state: Mapping[str, Any]) -> None:
        """Keep JSON values with the model, such as how far a script came; what was kept before is gone."""
        write_state(self.runtime().directory, state, None if self.trainable else self.name)

    def merge_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Add JSON values to those that are kept, objects within objects too; return all."""
        return merge_state(self.runtime().directory, state, None if self.trainable else self.name)

    write_state = overwrite_state  # OpenPipe ART's older name

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
    """A model that is trained. `base_model`, a directory or Hugging Face id, is its policy of step 0.

    Attributes:
        inference_engine: which engine serves it, `vllm` or `embedded`; without it the best that this machine can run.
    """

    trainable: ClassVar[bool] = True

    base_model: str
    inference_engine: str | None = None
    _internal_config: Any = PrivateAttr(None)  # OpenPipe ART's settings of engine and trainer; scripts set it late
    _server_config: Any = PrivateAttr(None)  # of `register`
    _started_with: dict[str, Any] | None = PrivateAttr(None)  # the engine's options when the model was registered

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
        self._internal()

    async def register(self, backend: Backend, _openai_client_config: Mapping[str, Any] | None = None) -> None:
        """Register the model with a backend; in a new project the base model becomes champion, as step 0.

        A project of another model or base raises a `ConfigError`, an engine that does not start an `EngineError`.
        """
        self._server_config = _openai_client_config
        options = self.engine_options()
        await super().register(backend)
        self._started_with = options

    def _internal(self) -> InternalConfig:
        # Each time anew: scripts also set `_internal_config` after the model is made.
        return internal_config(self._internal_config, self._server_config)

    def engine_options(self) -> dict[str, Any]:
        """Return the options of `art-patch serve` that the model's own settings give."""
        engine = {} if self.inference_engine is None else {"engine": self.inference_engine}
        return engine | self._internal().serve

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
        trajectory_groups: Iterable[TrajectoryGroup | Trajectory],
        config: TrainConfig | None = None,
        _config: Mapping[str, Any] | None = None,
        verbose: bool = False,
        eval_groups: Iterable[TrajectoryGroup] = (),
        **settings: Unpack[TrainSettings],
    ) -> TrainResult:
        """Train the next policy on groups of rollouts, and promote it; requests to the model go on meanwhile.

        Args:
            trajectory_groups: groups of rollouts, with a reward on each trajectory to learn from. Trajectories among
                them are put into groups of the same scenario.
            config: settings of the update; `None` uses the model's own `config`, if it is a `TrainConfig`, else the
                defaults of `TrainConfig`.
            _config: OpenPipe ART's experimental settings, as `art.dev.TrainConfig` has them.
            verbose: true prints a line to stderr for each optimizer step.
            eval_groups: groups that are evaluated every `config.eval_steps` optimizer steps and never trained on.
            settings: single settings, which win over `config`: fields of `TrainConfig`, or OpenPipe ART's arguments.
                One that has no meaning here raises a `ConfigError`.

        Raises:
            ConfigError: no trajectory has a reward, or no choice carries exact tokens; or only one of `eval_groups` and
                `eval_steps` is given.
            Busy: a cycle or another update is running on the project.
            TrainingError: the update failed; no policy was published, and the champion stays the same.
            EngineError: the engine cannot serve the new policy; the champion stays the same.
        """
        chosen = train_config({**(_config or {}), **settings}, self.update_config(config))
        groups = as_groups(trajectory_groups)
        return await self.runtime().train(groups, chosen, verbose=verbose, eval_groups=eval_groups)

    async def train_sft(
        self,
        trajectories: Iterable[Trajectory | TrajectoryGroup],
        config: TrainSFTConfig | TrainConfig | None = None,
        _config: Mapping[str, Any] | None = None,
        verbose: bool = False,
    ) -> TrainResult:
        """Imitate the answers in trajectories, and promote the new policy; no reward is used and no gate asked.

        All conversations of a trajectory are learned from, each up to its last answer; groups give their trajectories.
        Raises a `ConfigError` if there is nothing to learn, else as `train` does.
        """
        if _config:
            raise ConfigError(f"_config={_config!r} has no meaning here; leave it out")
        return await train_sft(self, trajectories, config, verbose=verbose)

    def update_config(self, config: TrainConfig | None = None) -> TrainConfig:
        """Return `config`, or the model's own, with what `_internal_config` says where it has the default.

        Raises a `ConfigError` if settings of the engine have changed since the model was registered.
        """
        if self._started_with not in (None, self.engine_options()):
            raise ConfigError(
                f"the engine was started with {self._started_with}, and the model now says {self.engine_options()}: "
                "set _internal_config and inference_engine before the model is registered"
            )
        own = self.config if isinstance(self.config, TrainConfig) else None
        return self._internal().over(own if config is None else config)

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
