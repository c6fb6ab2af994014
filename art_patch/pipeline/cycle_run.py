"""The configuration of a cycle, and the objects that all its steps share: store, engine, judge, metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from art_patch import grouping, rewards, serving, training
from art_patch._lib.option import Option
from art_patch.gate import GateConfig
from art_patch.promotion import CanaryConfig

if TYPE_CHECKING:  # so that the command line can read the options below without loading SQLAlchemy
    from art_patch.store import Store


class Progress(Protocol):
    """Protocol of the callback that steps call after each unit of work. If it raises an exception, the cycle ends."""

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Report that `done` of `total` units of a stage are finished; `note` is a short text for people."""
        ...


@dataclass(frozen=True, slots=True)
class CycleConfig:
    """All settings of a cycle. `keep_days` and `keep_trajectories`: what is deleted when the cycle ends."""

    # A sub-agent or a tool may take that long before the next call.
    settle_s: Annotated[float, Option(help="Seconds without a call after which a trajectory counts as finished.")] = (
        60.0
    )
    min_group_size: int = 4  # siblings
    max_group_size: int = 16  # siblings, which the judge ranks in one request
    holdout_share: float = 0.2  # of the scenarios: for the gate only, never trained on
    across: bool = False  # runs with the same words have the same task even if system prompts and tools differ
    embed: grouping.Embed | None = None  # puts tasks with different wordings into one group; `None`: words decide
    # With fewer groups, the update waits for the next cycle.
    min_groups: Annotated[int, Option(help="Smallest number of scored groups to train on.")] = 4
    # Of runs without siblings, and of held-out runs for the gate. Off, because a replay executes the user's code.
    replay: grouping.ReplayConfig | None = None
    resample: grouping.ResampleConfig | None = None  # the champion answers recorded turns again, to make siblings
    checks: Sequence[rewards.Check] = ()  # the user's functions that score trajectories
    combination: rewards.Combination = rewards.RULER  # makes one reward of several scores
    defence: rewards.DefenceConfig = field(default_factory=rewards.DefenceConfig)  # against a judge that is fooled
    train: training.TrainConfig = field(default_factory=training.TrainConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    # A candidate that passed the gate becomes champion (`auto`), waits for a person's decision (`approve`), or is
    # tested on `canary_percent` % of the app's sessions, until the test that `canary` configures ends.
    promotion: Literal["auto", "approve", "canary"] = "auto"
    canary_percent: float = 5.0
    canary: CanaryConfig = field(default_factory=CanaryConfig)
    # Finished work is kept. A whole gate is one piece of work, because half of a gate has no result.
    max_minutes: Annotated[
        float | None,
        Option(least=1, env=True, help="Begin no new piece of work after so many minutes. The next cycle continues."),
    ] = None
    idle_minutes: float | None = None  # nothing is done if apps made calls within so many minutes
    keep_days: float | None = None  # delete trajectories whose newest call is older
    keep_trajectories: int | None = None  # delete all but so many of the newest


# `art-patch score` has no engine, so grouping and scoring take a `Run`. A `Cycle` is one, too.
@dataclass(slots=True)
class Run:
    """The objects that the steps `group` and `score` need."""

    store: Store
    judge: rewards.OrderedJudge
    config: CycleConfig
    progress: Progress
    now: float  # when the cycle began, seconds since the epoch; all steps use this one time
    # Results of the steps, by the step's name; they become a part of the report.
    metrics: dict[str, Any] = field(default_factory=dict[str, Any], kw_only=True)


@dataclass(slots=True)
class Cycle(Run):
    """The objects that all steps of a cycle share: those of `Run`, the engine, the adapters and a name for the log."""

    engine: serving.EngineClient
    adapters: Path  # directory of the published policies; its parent is the project's directory
    who: str  # the person or job that the ledger and the audit log record
