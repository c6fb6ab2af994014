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
    """All settings of a cycle.

    Attributes:
        settle_s: a trajectory counts as finished this many seconds after its last call ended.
        min_group_size: smallest number of siblings in a group.
        max_group_size: largest number of siblings in a group; the judge ranks them in one request.
        holdout_share: share of the scenarios that are used by the gate only and never trained on.
        across: runs with the same words have the same task even if system prompts and tools differ.
        embed: an embedding model, which puts tasks with different wordings into one group. `None`: only words are
            compared.
        min_groups: smallest number of scored groups for an update; fewer groups wait for the next cycle.
        replay: settings for repeating runs that have no siblings, and held-out runs for the gate. `None`: no run is
            repeated, because a replay executes the user's code.
        resample: settings for letting the champion answer recorded turns again, to make siblings. `None`: it answers
            none.
        checks: the user's functions that score trajectories.
        combination: the rule that makes one reward of several scores.
        defence: limits of the defences against a judge that can be fooled.
        promotion: what happens to a candidate that passed the gate. `auto`: it becomes champion. `approve`: it waits
            for a person's decision. `canary`: it is tested on `canary_percent` % of the app's sessions, until the test
            that `canary` configures ends.
        max_minutes: after this time no new unit of work begins; finished work is kept. A whole gate is one unit,
            because half of a gate has no result.
        idle_minutes: the cycle does nothing if apps made calls within this many minutes. `None`: the cycle runs anyway.
        keep_days: when the cycle ends, delete trajectories whose newest call is older than this many days. `None`: no
            limit.
        keep_trajectories: when the cycle ends, delete all but this many of the newest trajectories. `None`: no limit.
    """

    # A sub-agent or a tool may take that long before the next call.
    settle_s: Annotated[float, Option(help="Seconds without a call after which a trajectory counts as finished.")] = (
        60.0
    )
    min_group_size: int = 4
    max_group_size: int = 16
    holdout_share: float = 0.2
    across: bool = False
    embed: grouping.Embed | None = None
    min_groups: Annotated[int, Option(help="Smallest number of scored groups to train on.")] = 4
    replay: grouping.ReplayConfig | None = None
    resample: grouping.ResampleConfig | None = None
    checks: Sequence[rewards.Check] = ()
    combination: rewards.Combination = rewards.RULER
    defence: rewards.DefenceConfig = field(default_factory=rewards.DefenceConfig)
    train: training.TrainConfig = field(default_factory=training.TrainConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    promotion: Literal["auto", "approve", "canary"] = "auto"
    canary_percent: float = 5.0
    canary: CanaryConfig = field(default_factory=CanaryConfig)
    max_minutes: Annotated[
        float | None,
        Option(least=1, env=True, help="Begin no new piece of work after so many minutes. The next cycle continues."),
    ] = None
    idle_minutes: float | None = None
    keep_days: float | None = None
    keep_trajectories: int | None = None


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

    engine: serving.Engine
    adapters: Path  # directory of the published policies; its parent is the project's directory
    who: str  # the person or job that the ledger and the audit log record
