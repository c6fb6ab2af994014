"""Supervised fine-tuning from a script, with OpenPipe ART's names: imitate conversations, then serve the new policy."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Protocol

from art_patch.errors import ConfigError
from art_patch.rollouts.model_runtime import ModelRuntime, TrainResult
from art_patch.rollouts.trajectory import Trajectory
from art_patch.training import TrainConfig


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
        rates = list(self.learning_rate) if isinstance(self.learning_rate, Sequence) else [self.learning_rate]
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
    trajectories: Iterable[Trajectory],
    config: TrainSFTConfig | TrainConfig | None = None,
    *,
    verbose: bool = False,
) -> TrainResult:
    """Imitate the answers in trajectories, and promote the new policy; see `TrainableModel.train_sft`."""
    given = list(trajectories)
    if not given:
        raise ConfigError("there is no trajectory to learn from")
    directory = model.runtime().directory
    with tempfile.NamedTemporaryFile("w", dir=directory, prefix="sft-", suffix=".jsonl") as file:  # mode 0600
        for each in given:
            tools = {"tools": list(each.tools)} if each.tools else {}
            file.write(json.dumps({"messages": each.messages(), **tools}) + "\n")
        file.flush()
        chosen = config if isinstance(config, TrainConfig) else (config or TrainSFTConfig()).over(model.update_config())
        return await model.runtime().train_files([Path(file.name)], chosen, verbose=verbose)


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
        if value not in (None, 0):
            raise ConfigError(f"{name}={value!r} has no meaning here: the file is trained whole; leave it out")
    with open(file_path, "rb") as file:
        lines = sum(1 for line in file if line.strip())
    steps = math.ceil(lines / batch_size) * epochs
    config = replace(
        model.update_config(), epochs=epochs, batch_size=batch_size, learning_rate=peak_lr, lr_schedule=schedule_type,
        warmup_steps=int(steps * warmup_ratio),
    )  # fmt: skip
    return await model.runtime().train_files([Path(file_path)], config, verbose=verbose)
