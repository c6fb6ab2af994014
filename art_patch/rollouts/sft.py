"""Supervised fine-tuning from a script, with OpenPipe ART's names: imitate conversations, then serve the new policy."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Protocol

from art_patch.errors import ArtPatchError, ConfigError
from art_patch.rollouts.forms import rollouts_in
from art_patch.rollouts.handed_over import handed_over
from art_patch.rollouts.model_runtime import ModelRuntime, TrainResult
from art_patch.rollouts.trajectory import History, Trajectory
from art_patch.rollouts.trajectory_group import TrajectoryGroup
from art_patch.training import TrainConfig

# Arguments of OpenPipe ART's `train_sft_from_file` that mean nothing here, with the values that change nothing.
_ABSENT: dict[str, tuple[Any, ...]] = {
    "initial_step": (0, None), "final_step": (None,), "_config": (None, {}), "shuffle_buffer_size": (None,),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrainSFTConfig:
    """Settings of `train_sft`.

    Attributes:
        learning_rate: the peak of AdamW's learning rate. A list, OpenPipe ART's rate of each batch, must hold one value
            only; a schedule is `lr_schedule` of a `TrainConfig`.
        batch_size: conversations in an optimizer step; "auto" makes an eighth of all.
    """

    learning_rate: float | Sequence[float] = 1e-4
    batch_size: int | Literal["auto"] = "auto"

    def over(self, config: TrainConfig) -> TrainConfig:
        """Return the config with these settings, for one pass over the data."""
        given: Any = self.learning_rate
        several = isinstance(given, Iterable) and not isinstance(given, str)
        rates: list[Any] = [float(rate) for rate in given] if several else [given]
        if len(set(rates)) != 1:
            raise ConfigError(
                f"learning_rate has {len(set(rates))} values; give its peak, and a schedule with "
                "train_sft(trajectories, TrainConfig(learning_rate=..., lr_schedule='linear'))"
            )
        size = None if self.batch_size == "auto" else self.batch_size
        return replace(config, learning_rate=rates[0], batch_size=size, epochs=1)


class Trained(Protocol):
    """What a `TrainableModel` is here."""

    def runtime(self) -> ModelRuntime:
        """Return the model's store, engine and trainer."""
        ...

    def update_config(self) -> TrainConfig:
        """Return the settings of the model's updates."""
        ...


async def train_sft(
    model: Trained,
    trajectories: Iterable[Trajectory | TrajectoryGroup],
    config: Any = None,
    *,
    verbose: bool = False,
) -> TrainResult:
    """Imitate the answers in trajectories, and promote the new policy; see `TrainableModel.train_sft`."""
    if not isinstance(config, TrainSFTConfig | TrainConfig | None):
        raise ConfigError(f"config={config!r} is neither an art.TrainSFTConfig nor an art.TrainConfig")
    chosen = config if isinstance(config, TrainConfig) else (config or TrainSFTConfig()).over(model.update_config())
    given: list[Trajectory] = []
    for each in rollouts_in(trajectories):
        if isinstance(each, BaseException):
            raise ConfigError(f"a {type(each).__name__} of a rollout cannot be imitated; leave it out") from each
        given += [each] if isinstance(each, Trajectory) else each.trajectories
    if not given:
        raise ConfigError("there is no trajectory to learn from")
    lines = [_line(history, at) for at, each in enumerate(given, start=1) for history in each.histories()]
    with handed_over(model.runtime().directory, lines) as file:
        try:
            return await model.runtime().train_files([file], chosen, verbose=verbose)
        except ArtPatchError as error:  # the file is gone then, and nobody has seen it
            said = str(error).replace(f"{file}, line ", "conversation ").replace(f"{file.name}, line ", "conversation ")
            raise type(error)(said) from error


def _line(history: History, at: int) -> str:
    messages = history.messages()
    # After its last answer there is nothing to imitate; runs of agents end with what a tool or a game said.
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        raise ConfigError(f"trajectory {at} has a conversation without an answer of the assistant; leave it out")
    try:
        return json.dumps({"messages": messages, **({"tools": list(history.tools)} if history.tools else {})})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"trajectory {at} holds what is no JSON: {error}") from error


async def train_sft_from_file(
    model: Trained,
    file_path: str | PathLike[str],
    epochs: int = 1,
    batch_size: int = 2,
    peak_lr: float = 2e-4,
    schedule_type: Literal["constant", "linear", "cosine"] = "linear",
    warmup_ratio: float = 0.1,
    *,
    verbose: bool = False,
    **absent: Any,
) -> TrainResult:
    """Imitate the conversations of a training file, and promote the new policy.

    Args:
        model: the model, which must be registered.
        file_path: a file of JSON lines or Parquet, in any format that `art-patch train` takes.
        epochs: passes over the file.
        batch_size: conversations in an optimizer step.
        peak_lr: peak of the learning rate.
        schedule_type: "constant", "linear" or "cosine", after the warm-up.
        warmup_ratio: share of all steps over which the learning rate rises to its peak.
        verbose: true prints a line to stderr for each optimizer step.
        absent: arguments of OpenPipe ART's that mean nothing here. They raise a `ConfigError`: the file is read whole,
            and an update that is killed is continued by itself.

    Raises as `TrainableModel.train_sft` does, and a `MalformedFile` if a line is wrong.
    """
    for name, value in absent.items():
        if name not in _ABSENT:
            raise ConfigError(f"train_sft_from_file takes no {name}; see its docstring")
        if value not in _ABSENT[name]:
            raise ConfigError(f"{name}={value!r} has no meaning here: the file is trained whole; leave it out")
    if not 0 <= warmup_ratio <= 1:
        raise ConfigError(f"warmup_ratio={warmup_ratio!r} must be from 0 to 1")
    config = replace(
        model.update_config(), epochs=epochs, batch_size=batch_size, learning_rate=peak_lr, lr_schedule=schedule_type
    )
    steps = math.ceil(_conversations(file_path) / batch_size) * epochs
    config = replace(config, warmup_steps=int(steps * warmup_ratio))
    return await model.runtime().train_files([Path(file_path)], config, verbose=verbose)


def _conversations(path: str | PathLike[str]) -> int:
    with open(path, "rb") as file:
        if file.read(4) != b"PAR1":
            file.seek(0)
            return sum(1 for line in file if line.strip())
    from pyarrow import parquet  # slow to import, and only there with the extra that reads such files

    return parquet.ParquetFile(path).metadata.num_rows
