"""`LocalBackend`: engines and trainers on this machine, for the models that are registered with it.

What it starts ends with `close()`, or with the script. Everything lies in the project's directory, as if `art-patch`
had been used: `art-patch status --project NAME` shows it, `rollback` goes back, `trajectories` lists the rollouts.
"""

from __future__ import annotations

import atexit
import logging
import math
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from art_patch.errors import ConfigError
from art_patch.rollouts import logs
from art_patch.rollouts.model import Model, TrainableModel, TrainResult, has_reward
from art_patch.rollouts.model_runtime import ModelRuntime
from art_patch.rollouts.progress import bar
from art_patch.rollouts.trajectory_group import TrajectoryGroup
from art_patch.serving import exact_url
from art_patch.settings import load_settings
from art_patch.training import TrainConfig, require_evaluation
from art_patch.trajectories import exact_of
from art_patch.types import Policy

if TYPE_CHECKING:
    from os import PathLike

_log = logging.getLogger(__name__)

_open: weakref.WeakSet[LocalBackend] = weakref.WeakSet()

_METRICS = (
    "loss", "kl_nats", "clip_fraction", "entropy_nats", "grad_norm", "trajectories", "tokens", "steps",
    "eval_loss", "eval_kl_nats", "eval_gain_nats",
)  # fmt: skip
"""Of an update, that stand in the history and in a `TrainResult`."""


class LocalBackend:
    """See the module."""

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
        """Start nothing yet. All but the first two are options of `art-patch serve`, for an engine that is started.

        Args:
            path: directory of all projects; the user's data directory unless given (`ART_PATCH_HOME`).
            store: database URL; a SQLite file in the project's directory unless given (`ART_PATCH_STORE`).
            engine: `vllm`, `embedded` or `auto`.
            device: of the embedded engine.
            dtype: of the weights that serve.
            threads: of the engine, on a CPU.
            max_model_len: tokens of prompt and answer together.
            max_lora_rank: the largest rank that may serve.
            replicas: vLLM processes.
            tensor_parallel_size: GPUs of one.
            gpu_memory_utilization: share of a GPU's memory that vLLM takes; leave some for training.
            tool_parser: vLLM's.
        """
        options = {
            "engine": engine, "device": device, "dtype": dtype, "threads": threads, "max_model_len": max_model_len,
            "max_lora_rank": max_lora_rank, "replicas": replicas, "tensor_parallel_size": tensor_parallel_size,
            "gpu_memory_utilization": gpu_memory_utilization, "tool_parser": tool_parser,
        }  # fmt: skip
        self._options = {name: str(value) for name, value in options.items() if value is not None}
        self._home = None if path is None else Path(path)
        self._store = store
        self._runtimes: dict[tuple[str, str], ModelRuntime] = {}
        _open.add(self)

    async def register(self, model: Model[Any]) -> None:
        """Bind a model; called by `model.register(backend)`.

        Raises:
            ConfigError: its project's or its own name cannot be, or the project serves another model.
            EngineError: its engine does not start.
        """
        runtime = self._runtime(model)
        if not isinstance(model, TrainableModel):
            await runtime.open_store()
            return
        base_url, key = await runtime.open()
        model.inference_base_url, model.inference_api_key = exact_url(base_url), key or "none"
        await self.champion(model)

    async def champion(self, model: TrainableModel[Any]) -> Policy:
        """Return the policy that serves, which is where the model's requests go from now on."""
        champion = await self._runtime(model).champion()
        model.now_serves(champion.name)
        return champion

    async def train(
        self,
        model: TrainableModel[Any],
        groups: Sequence[TrajectoryGroup],
        config: TrainConfig,
        *,
        verbose: bool,
        evaluation: Sequence[TrajectoryGroup] = (),
    ) -> TrainResult:
        """See `TrainableModel.train`."""
        runtime = self._runtime(model)
        _check_evaluation(groups, evaluation, config)
        _check(model, groups)
        began = await self.champion(model)
        metrics = logs.metrics_of(groups)
        ids = await runtime.keep(groups, {"split": "train", "step": began.step}, state="scored")
        others = await runtime.keep(evaluation, {"split": "eval", "step": began.step}, state="spent")
        with bar("train", 1) as shown:

            def progress(done: int, total: int, note: str) -> None:
                shown.at(done, total, note)
                if verbose:
                    print(f"train {done}/{total} {note}", file=sys.stderr)

            found = await runtime.trainer.update(ids, config, who=runtime.who, progress=progress, evaluation=others)
        if found["reason"]:
            _log.warning("%s learned nothing: %s; %s serves on", model.name, found["reason"], found["champion"])
        else:
            metrics |= {name: float(value) for name in _METRICS if _is_number(value := found["metrics"].get(name))}
            if others and not found["metrics"]["evaluation"]["groups"]:
                _log.warning("nothing was evaluated: %s", found["metrics"]["evaluation"]["left_out"])
        champion = await self.champion(model)
        await runtime.note("train", metrics, step=began.step)
        return TrainResult(champion.step, metrics, found["path"], found["reason"])

    async def log(
        self, model: Model[Any], groups: Sequence[TrajectoryGroup], split: str, metrics: Mapping[str, float]
    ) -> None:
        """See `Model.log`."""
        runtime = self._runtime(model)
        step = (await self.champion(model)).step if isinstance(model, TrainableModel) else 0
        await runtime.keep(groups, {"split": split, "step": step, "model": model.name}, state="spent")
        await runtime.note(split, {**logs.metrics_of(groups), **metrics}, step=step)

    async def promote(self, model: TrainableModel[Any], policy: str) -> Policy:
        """Let an earlier policy serve again, or a later one, and return it; nothing happens if it serves already.

        Args:
            model: whose policy it is.
            policy: `NAME@STEP`.

        Raises:
            StoreError: the project has no such policy.
            TransitionError: it was given up.
            EngineError: the engine cannot serve it; the same policy serves as before.
        """
        await self._runtime(model).promote(policy)
        return await self.champion(model)

    async def ensure(self, model: TrainableModel[Any], policy: str) -> None:
        """Have the engine serve a policy beside the one that requests reach.

        Args:
            model: whose policy it is.
            policy: `NAME@STEP`.

        Raises:
            StoreError: the project has no such policy.
            EngineError: the engine cannot serve it.
        """
        await self._runtime(model).ensure(policy)

    async def history(self, model: TrainableModel[Any], metric: str) -> list[tuple[int, float]]:
        """See `TrainableModel.history`."""
        return logs.history(self._runtime(model).settings.directory, metric)

    async def delete_checkpoints(self, model: TrainableModel[Any], best_metric: str) -> list[str]:
        """See `TrainableModel.delete_checkpoints`."""
        return await self._runtime(model).forget(best_metric)

    def close(self) -> None:
        """End every engine and trainer that was started here; twice does no harm."""
        runtimes, self._runtimes = list(self._runtimes.values()), {}
        for runtime in runtimes:
            runtime.close()

    def __enter__(self) -> Self:
        """Close at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _runtime(self, model: Model[Any]) -> ModelRuntime:
        key = (model.project, model.name)
        if key not in self._runtimes:
            settings = load_settings(project=model.project, home=self._home, store=self._store)
            base = model.base_model if isinstance(model, TrainableModel) else None
            self._runtimes[key] = ModelRuntime(settings, model.name, base, self._options)
        return self._runtimes[key]


def _check(model: TrainableModel[Any], groups: Sequence[TrajectoryGroup]) -> None:
    """Pass if there may be something to learn.

    Raises:
        ConfigError: a mistake in the script is the reason why there cannot be.
    """
    choices = [choice for group in groups for trajectory in group for choice in trajectory.choices()]
    if not any(exact_of(choice) for choice in choices):
        raise ConfigError(
            f"none of {len(choices)} choices in {len(groups)} groups carries its exact tokens, so nothing can be "
            f"learned; ask {model.name} through model.openai_client(), or at model.inference_base_url, and append "
            "`completion.choices[0]` itself to messages_and_choices"
        )
    if not any(has_reward(group) for group in groups):
        raise ConfigError("no trajectory has a reward, so nothing can be learned; set trajectory.reward")


def _check_evaluation(
    groups: Sequence[TrajectoryGroup], evaluation: Sequence[TrajectoryGroup], config: TrainConfig
) -> None:
    """Pass if there is something to evaluate on just when the config asks for it, and none of it is learned.

    Raises:
        ConfigError: it is not so.
    """
    require_evaluation(config, [group for group in evaluation if group.trajectories])
    learned = {id(trajectory) for group in groups for trajectory in group}
    if any(id(trajectory) in learned for group in evaluation for trajectory in group):
        raise ConfigError("a trajectory is in eval_groups and is learned from, too; evaluate on others")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


@atexit.register
def _close_all() -> None:
    for backend in list(_open):
        backend.close()
