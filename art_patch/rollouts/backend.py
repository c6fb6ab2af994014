"""`LocalBackend` runs engines and trainers on this machine for the models registered with it; `start` registers one.

Processes that the backend starts end with `close()`, or with the script. All files are in the project's directory, as
with the `art-patch` commands: `art-patch status --project NAME` shows the policies, `art-patch rollback` promotes an
earlier one, and `art-patch trajectories` lists the rollouts.
"""

import atexit
import weakref
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from art_patch import errors, serving, settings
from art_patch.rollouts.forms import TrainSettings
from art_patch.rollouts.model import Completion, Model, TrainableModel
from art_patch.rollouts.model_runtime import ModelRuntime, TrainResult
from art_patch.rollouts.trajectory import Trajectory
from art_patch.rollouts.trajectory_group import TrajectoryGroup
from art_patch.training import TrainConfig
from art_patch.types import Policy

# Weak, so that a backend that the script has dropped is not kept alive until the interpreter ends.
_open: weakref.WeakSet["LocalBackend"] = weakref.WeakSet()


# Methods of OpenPipe ART's backends that cannot exist here, and what to do instead.
_ABSENT = {
    "_experimental_pull_from_s3": "all files are in the project's directory; copy that, or `art-patch policies import`",
    "_experimental_push_to_s3": "all files are in the project's directory; copy that, or `art-patch policies export`",
    "_experimental_pull_model_checkpoint": "run `art-patch policies export NAME@STEP DIRECTORY`",
    "_experimental_fork_checkpoint": "run `art-patch policies fork NAME@STEP --as OTHER` before the script",
    "_experimental_deploy": "run `art-patch policies push NAME@STEP OWNER/REPOSITORY`",
}


class Closed:
    """What `LocalBackend.close` returns: nothing is left to do, and awaiting it does nothing."""

    def __await__(self) -> Generator[None, None, None]:
        """Return at once."""
        return
        yield


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
        base_url: str | None = None,
    ) -> None:
        """Create the backend; its processes start when a model is registered.

        The arguments from `engine` to `tool_parser` are options of `art-patch serve`, which documents them, and an
        error if an engine runs already. `path` is the directory of all projects, `store` the database, `base_url` the
        address of an engine that serves the project; each has the default of its setting.
        """
        given = {name: value for name, value in locals().items() if name not in ("self", "path", "store", "base_url")}
        # Options that are not given are left to `art-patch serve` and its own defaults.
        self._options = {name: str(value) for name, value in given.items() if value is not None}
        self._home = None if path is None else Path(path)
        self._store = store
        self._base_url = base_url
        self._runtimes: dict[tuple[str, str], ModelRuntime] = {}
        _open.add(self)

    if not TYPE_CHECKING:  # a type checker would take every attribute for one that exists

        def __getattr__(self, name: str) -> Any:
            """Raise an `AttributeError`, which says for OpenPipe ART's methods what to do instead."""
            if name in _ABSENT:
                raise AttributeError(f"LocalBackend has no {name}: {_ABSENT[name]}; leave it out")
            raise AttributeError(f"LocalBackend has no attribute {name!r}")

    async def register(self, model: Model[Any]) -> None:
        """Open the store of the model's project, and for a `TrainableModel` start its engine or use the one that runs.

        Raises a `ConfigError` if a name is not allowed, the project serves another model, or an engine runs already
        although options for a new one were given; an `EngineError` if the engine does not start.
        """
        runtime = self._runtime(model)
        if isinstance(model, TrainableModel):
            base_url, key = await runtime.open(model.base_model)
            model.inference_base_url, model.inference_api_key = serving.exact_url(base_url), key or "none"
        else:
            await runtime.open_store()
        model.bind(runtime)

    async def train(
        self,
        model: TrainableModel[Any],
        trajectory_groups: Iterable[TrajectoryGroup | Trajectory],
        config: TrainConfig | None = None,
        *,
        verbose: bool = False,
        eval_groups: Iterable[TrajectoryGroup] = (),
        **settings: Unpack[TrainSettings],
    ) -> TrainResult:
        """Train and promote a registered model's next policy; arguments and errors are those of `model.train`."""
        return await model.train(trajectory_groups, config, None, verbose, eval_groups, **settings)

    async def promote(self, model: TrainableModel[Any], policy: str) -> Policy:
        """Make another policy of a registered model the champion, without a gate run, and return it.

        Raises:
            NotFound: the project has no such policy.
            TransitionError: the policy was rejected or deleted.
            EngineError: the engine cannot serve the policy; the champion stays the same.
        """
        return await self._runtime(model).promote(policy)

    def close(self) -> Closed:
        """End every engine and trainer that this backend started; a second call does nothing.

        All is done when it returns. The result can be awaited, since scripts for OpenPipe ART `await backend.close()`.
        """
        runtimes, self._runtimes = list(self._runtimes.values()), {}
        for runtime in runtimes:
            runtime.close()
        return Closed()

    def __enter__(self) -> Self:
        """Return the backend itself."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Close the backend."""
        self.close()

    async def __aenter__(self) -> Self:
        """Return the backend itself."""
        return self

    async def __aexit__(self, *raised: object) -> None:
        """Close the backend."""
        self.close()

    def _runtime(self, model: Model[Any]) -> ModelRuntime:
        # Two objects of one model share the runtime, and so its store, engine and trainer.
        key = (model.project, model.name)
        if key not in self._runtimes:
            given = {"home": self._home, "store": self._store, "base_url": self._base_url}
            project = settings.load_settings(project=model.project, **given)
            self._runtimes[key] = ModelRuntime(project, model.name)
        runtime = self._runtimes[key]
        if isinstance(model, TrainableModel):
            # What the backend was told wins over the model's own settings.
            runtime.start_with({name: str(value) for name, value in model.engine_options().items()} | self._options)
        return runtime


class TrainingApi:
    """A registered model with the two calls that a training script needs; `start` yields it."""

    def __init__(self, model: TrainableModel[Any]) -> None:
        self.model = model

    async def create_completion(self, asked: Trajectory | Sequence[Mapping[str, Any]], **params: Any) -> Completion:
        """Ask the model, with arguments, result and errors of `Model.create_completion`."""
        return await self.model.create_completion(asked, **params)

    async def train(
        self,
        groups: Iterable[TrajectoryGroup | Trajectory],
        config: TrainConfig | None = None,
        *,
        eval_groups: Iterable[TrajectoryGroup] = (),
        **settings: Unpack[TrainSettings],
    ) -> TrainResult:
        """Update the model from groups of rollouts, with arguments, result and errors of `TrainableModel.train`."""
        return await self.model.train(groups, config, eval_groups=eval_groups, **settings)


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
