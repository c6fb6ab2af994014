"""`LocalBackend` runs engines and trainers on this machine for the models registered with it; `start` registers one.

Processes that the backend starts end with `close()`, or with the script. All files are in the project's directory, as
with the `art-patch` commands: `art-patch status --project NAME` shows the policies, `art-patch rollback` promotes an
earlier one, and `art-patch trajectories` lists the rollouts.
"""

import atexit
import weakref
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self, cast

from openai.types.chat import ChatCompletion

from art_patch import errors, serving, settings
from art_patch.rollouts.model import Model, TrainableModel
from art_patch.rollouts.model_runtime import ModelRuntime, TrainResult
from art_patch.rollouts.trajectory import Trajectory
from art_patch.rollouts.trajectory_group import TrajectoryGroup
from art_patch.training import TrainConfig
from art_patch.types import Policy

# Weak, so that a backend that the script has dropped is not kept alive until the interpreter ends.
_open: weakref.WeakSet["LocalBackend"] = weakref.WeakSet()


class LocalBackend:
    """Runs engines and trainers on this machine for registered models; as a context manager it ends them."""

    def __init__(
        self,
        *,
        path: str | PathLike[str] | None = None,
        store: str | None = None,
        engine: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        threads: int | None = None,
        max_model_len: int | None = None,
        max_lora_rank: int | None = None,
        replicas: int | None = None,
        tensor_parallel_size: int | None = None,
        gpu_memory_utilization: float | None = None,
        tool_parser: str | None = None,
    ) -> None:
        """Create the backend; its processes start when a model is registered.

        The arguments after `store` are options of `art-patch serve`, which documents them, and an error if an engine
        runs already. `path` is the directory of all projects, `store` the database; each has the default of its
        setting.
        """
        given = {name: value for name, value in locals().items() if name not in ("self", "path", "store")}
        # Options that are not given are left to `art-patch serve` and its own defaults.
        self._options = {name: str(value) for name, value in given.items() if value is not None}
        self._home = None if path is None else Path(path)
        self._store = store
        self._runtimes: dict[tuple[str, str], ModelRuntime] = {}
        _open.add(self)

    async def register(self, model: Model[Any]) -> None:
        """Open the store of the model's project, and for a `TrainableModel` start its engine or use the one that runs.

        Raises a `ConfigError` if a name is not allowed, the project serves another model, or an engine runs already
        although options for a new one were given; an `EngineError` if the engine does not start.
        """
        runtime = self._runtime(model)
        if isinstance(model, TrainableModel):
            base_url, key = await runtime.open()
            model.inference_base_url, model.inference_api_key = serving.exact_url(base_url), key or "none"
        else:
            await runtime.open_store()
        model.bind(runtime)

    async def promote(self, model: TrainableModel[Any], policy: str) -> Policy:
        """Make another policy of a registered model the champion, without a gate run, and return it.

        Raises:
            NotFound: the project has no such policy.
            TransitionError: the policy was rejected or deleted.
            EngineError: the engine cannot serve the policy; the champion stays the same.
        """
        return await self._runtime(model).promote(policy)

    def close(self) -> None:
        """End every engine and trainer that this backend started; a second call does nothing."""
        runtimes, self._runtimes = list(self._runtimes.values()), {}
        for runtime in runtimes:
            runtime.close()

    def __enter__(self) -> Self:
        """Return the backend itself."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Close the backend."""
        self.close()

    def _runtime(self, model: Model[Any]) -> ModelRuntime:
        # Two objects of one model share the runtime, and so its store, engine and trainer.
        key = (model.project, model.name)
        if key not in self._runtimes:
            project = settings.load_settings(project=model.project, home=self._home, store=self._store)
            base = model.base_model if isinstance(model, TrainableModel) else None
            self._runtimes[key] = ModelRuntime(project, model.name, base, self._options)
        return self._runtimes[key]


class TrainingApi:
    """A registered model with the two calls that a training script needs; `start` yields it."""

    def __init__(self, model: TrainableModel[Any]) -> None:
        self.model = model

    async def create_completion(
        self, trajectory: Trajectory, *, tools: Sequence[Mapping[str, Any]] | None = None, **params: Any
    ) -> ChatCompletion:
        """Ask the model to continue a trajectory, append the first choice to it, and return the full answer.

        Args:
            tools: tools to offer from this request on; without it the trajectory's own tools are offered.
            params: settings of the request: `temperature`, `max_tokens`, ...

        Raises:
            ConfigError: `params` asks for a stream, which this call cannot return.
        """
        if params.get("stream"):
            raise errors.ConfigError("create_completion appends whole answers; leave stream=True out")
        if tools is not None:
            trajectory.tools = cast("Any", list(tools))
        if trajectory.tools:
            params["tools"] = trajectory.tools
        answer: Any = await self.model.openai_client().chat.completions.create(
            model=self.model.name, messages=trajectory.messages(), **params
        )
        trajectory.messages_and_choices.append(answer.choices[0])
        return answer

    async def train(
        self,
        groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        *,
        eval_groups: Iterable[TrajectoryGroup] = (),
    ) -> TrainResult:
        """Update the model from groups of rollouts, with arguments, result and errors of `TrainableModel.train`."""
        return await self.model.runtime().train(groups, config, eval_groups=eval_groups)


@asynccontextmanager
async def start(
    model: TrainableModel[Any], backend: LocalBackend | Literal["local"] = "local", **options: Any
) -> AsyncGenerator[TrainingApi]:
    """Register a model, and yield a `TrainingApi` with the calls of a training script.

    Args:
        backend: `"local"` creates a `LocalBackend`, which is closed after the block; a `LocalBackend` that is passed in
            stays open.
        options: arguments for the `LocalBackend` that `"local"` creates.

    Raises:
        ConfigError: the backend is another string than `"local"`, or options are given together with a `LocalBackend`.
    """
    given = isinstance(backend, LocalBackend)
    if given and options:
        raise errors.ConfigError(f"{', '.join(options)}: give options to the LocalBackend itself")
    if not given and backend != "local":
        raise errors.ConfigError(f'there is no backend {backend!r}; write backend="local", or give a LocalBackend')
    with nullcontext(backend) if given else LocalBackend(**options) as used:
        await model.register(used)
        async with model.openai_client():
            yield TrainingApi(model)


@atexit.register
def _close_all() -> None:
    # Children also notice by themselves that the script has ended. Here they are asked to end in order, and waited for.
    for backend in list(_open):
        backend.close()
