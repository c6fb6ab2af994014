"""The configuration of a cycle, and the parts that its steps share: store, engine, judge, metrics. Records only."""

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
    """A callback that steps call after each unit of work. An exception that it raises ends the cycle."""

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Report that `done` of `total` units of a stage are finished; `note` is a short text for people."""
        ...


@dataclass(frozen=True, slots=True)
class CycleConfig:
    """All settings of a cycle.

    Attributes:
        settle_s: a trajectory counts as finished this many seconds after its last call ended.
        min_group_size: siblings that a group needs.
        max_group_size: siblings that the judge ranks in one request.
        holdout_share: share of the scenarios that only the gate sees and training never learns from.
        across: the same words are the same task even under different system prompts and tools.
        embed: an embedding model; groups tasks that are worded differently. `None`: compare words alone.
        min_groups: with fewer scored groups no update is made; the groups wait for more.
        replay: repeats runs that have no siblings, and held-out runs for the gate. `None`: never, because a replay
            executes the user's code.
        resample: lets the champion answer recorded turns again to make siblings. `None`: never.
        checks: the user's functions that score trajectories.
        combination: the rule that makes one reward of several scores.
        defence: how far the judge is trusted.
        promotion: what happens to a candidate that passed the gate. `auto`: it serves. `approve`: a person decides.
            `canary`: it is first tested on `canary_percent` % of the app's sessions, until `canary` says stop.
        max_minutes: no new unit of work begins after this time; finished work is kept. A gate is one unit, because
            half of a gate has no result.
        idle_minutes: the cycle does nothing if apps made calls within this many minutes. `None`: do not look.
        keep_days: at the end, delete trajectories whose last call is older than this many days.
        keep_trajectories: at the end, keep only this many of the newest trajectories.
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
    """The parts that the steps `group` and `score` share.

    Attributes:
        now: when the cycle began, seconds since the epoch. All steps use this one time.
        metrics: results of the steps, by the step's name; they become a part of the report.
    """

    store: Store
    judge: rewards.OrderedJudge
    config: CycleConfig
    progress: Progress
    now: float
    metrics: dict[str, Any] = field(default_factory=dict[str, Any], kw_only=True)


@dataclass(slots=True)
class Cycle(Run):
    """The parts that all steps of a cycle share.

    Attributes:
        adapters: directory of the published policies; its parent is the project's directory.
        who: the person or job that the ledger and the audit log name.
    """

    engine: serving.Engine
    adapters: Path
    who: str
