"""What the stages of one cycle share: the store, the engine, the judge, how they are to work, and what they found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from art_patch.gate import GateConfig
from art_patch.grouping import Embed, ReplayConfig, ResampleConfig
from art_patch.promotion import CanaryConfig
from art_patch.rewards import RULER, Check, Combination, DefenceConfig, OrderedJudge
from art_patch.serving import Engine
from art_patch.store import Store
from art_patch.training import TrainConfig


class Progress(Protocol):
    """Called as work goes on: stage, how much is done, how much there is, a word on it."""

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Show it."""
        ...


@dataclass(frozen=True, slots=True)
class CycleConfig:
    """How a cycle is made.

    Attributes:
        settle_s: a trajectory is whole when its last call ended this long ago.
        min_group_size: siblings that a group needs.
        max_group_size: siblings that the judge ranks at once.
        holdout_share: part of the scenarios that only the gate sees.
        across: the same words are the same task under other system prompts and tools, too.
        embed: texts -> vectors; brings together what words alone do not. Where it is down, words alone decide.
        min_groups: with fewer scored groups nothing is trained; they wait for more.
        replay: how runs that have no siblings are repeated, and held-out ones by the gate; `None` repeats none, because
            it runs the user's code.
        resample: how siblings are made for runs that have none; `None` makes none.
        checks: functions of the user's that score trajectories.
        combination: how scores make a reward.
        defence: how far the judge is trusted.
        train: the update.
        gate: the test.
        promotion: what becomes of a candidate that won: it serves (`auto`), waits for a person (`approve`), or is first
            tested on a share of the app's sessions (`canary`).
        canary_percent: that share.
        canary: when that test ends, and how.
        max_minutes: no further unit of work is begun after so long; what was done is kept, the rest waits for the next
            cycle. A gate is one unit, because half of one says nothing.
        idle_minutes: nothing is done while the app made calls in the last so many minutes; `None` asks nothing.
        keep_days: trajectories whose last call is longer ago are deleted at the end.
        keep_trajectories: of the others, all but the newest so many are deleted at the end.
    """

    settle_s: float = 60.0
    min_group_size: int = 4
    max_group_size: int = 16
    holdout_share: float = 0.2
    across: bool = False
    embed: Embed | None = None
    min_groups: int = 4
    replay: ReplayConfig | None = None
    resample: ResampleConfig | None = None
    checks: Sequence[Check] = ()
    combination: Combination = RULER
    defence: DefenceConfig = field(default_factory=DefenceConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    promotion: Literal["auto", "approve", "canary"] = "auto"
    canary_percent: float = 5.0
    canary: CanaryConfig = field(default_factory=CanaryConfig)
    max_minutes: float | None = None
    idle_minutes: float | None = None
    keep_days: float | None = None
    keep_trajectories: int | None = None


@dataclass(slots=True)
class Run:
    """What groups and scores are made with.

    Attributes:
        store: where traffic was recorded.
        judge: ranks siblings.
        config: how.
        progress: told what goes on.
        now: when it began, seconds since the epoch.
        metrics: what each stage found, by its name.
    """

    store: Store
    judge: OrderedJudge
    config: CycleConfig
    progress: Progress
    now: float
    metrics: dict[str, Any] = field(default_factory=dict[str, Any], kw_only=True)


@dataclass(slots=True)
class Cycle(Run):
    """What a whole cycle is made with.

    Attributes:
        engine: the serving engine.
        adapters: directory of published policies.
        who: for the ledger.
    """

    engine: Engine
    adapters: Path
    who: str
