"""Groups that a caller chose -> the policy that serves: the cycle's training and promotion, and nothing between them.

No judge is asked, because the caller gave the rewards, and no gate, because the caller says when: the policy serves as
soon as the engine has proven it. All else is as in the cycle: alone on the store, staleness, exact tokens only, the
ledger and its audit log, what a killed update left is swept. `art-patch rollback` goes back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from art_patch.errors import AdapterRejected, StoreError
from art_patch.pipeline.cycle_lock import Holding, alone
from art_patch.pipeline.cycle_run import Cycle, CycleConfig, Progress
from art_patch.pipeline.train_policy import train_groups
from art_patch.pipeline.unfinished import discard, sweep
from art_patch.promotion import promote, reject
from art_patch.rewards import OrderedJudge
from art_patch.serving import Engine
from art_patch.store import Store
from art_patch.training import TrainConfig, require_evaluation
from art_patch.types import JSON, Policy

REASON = "trained by hand; no gate was asked"


@dataclass(frozen=True, slots=True)
class UpdateByHand:
    """What an update came to.

    Attributes:
        champion: who serves now.
        path: of its adapter; `None` for the base.
        reason: why nothing was learned; empty if something was.
        metrics: of the update.
    """

    champion: str
    path: str | None
    reason: str = ""
    metrics: JSON = field(default_factory=dict[str, Any])


def run_explicit_update(
    store: Store,
    engine: Engine,
    adapters: Path,
    config: TrainConfig,
    group_ids: Sequence[str],
    *,
    evaluation: Sequence[str] = (),
    who: str,
    progress: Progress,
    now: float | None = None,
) -> UpdateByHand:
    """Train on these groups, and let the policy serve.

    Args:
        store: where the groups are kept, scored.
        engine: the serving engine.
        adapters: directory of published policies.
        config: how.
        group_ids: which groups.
        evaluation: groups that it evaluates on and does not learn from, every `config.eval_steps` steps.
        who: for the ledger.
        progress: told what goes on.
        now: seconds since the epoch.

    Raises:
        ConfigError: an evaluation is asked for and there is nothing to evaluate on, or the other way round.
        Busy: a cycle, or another update, is at work on this store.
        TrainingError: the update failed; nothing was published.
        EngineError: the engine cannot serve the policy; the champion stays. One that it refuses is rejected.
        StoreError: no policy serves yet.
    """
    require_evaluation(config, evaluation)
    with alone(store, adapters.parent, who=who) as holding:
        champion = holding.store.ledger.champion()
        if champion is None:
            raise StoreError("no policy serves yet; start `art-patch serve --base MODEL`")
        nobody = cast("OrderedJudge", None)
        run = Cycle(
            holding.store, nobody, CycleConfig(train=config), _Watch(holding, progress),
            time.time() if now is None else now, engine, adapters, who,
        )  # fmt: skip
        sweep(run, champion)
        _discard_unfinished(run)
        read = run.store.read
        candidate, reason = train_groups(
            run, champion, read.groups_of(group_ids), evaluation=read.groups_of(evaluation)
        )
        metrics = run.metrics["train"]
        if candidate is None:
            return UpdateByHand(champion.name, champion.path, reason, metrics)
        try:
            serves: Policy = promote(run.store.ledger, engine, candidate.name, who=who, reason=REASON)
        except AdapterRejected as error:
            if error.final:  # as in a cycle: it would be refused every time
                reject(run.store.ledger, engine, candidate.name, who=who, reason=f"the engine refuses it: {error}")
            raise
        return UpdateByHand(serves.name, serves.path, metrics=metrics)


def _discard_unfinished(run: Cycle) -> None:
    """Whoever trains by hand samples anew; the groups of an update that was killed wait for the next cycle."""
    known = {policy.name for policy in run.store.ledger.policies()}
    for job in sorted((run.adapters.parent / "training").glob("*@*")):
        discard(job, run.adapters, known)


class _Watch:
    """Told what goes on; ends an update whose lease was lost, between two steps."""

    def __init__(self, holding: Holding, progress: Progress) -> None:
        self._holding = holding
        self._progress = progress

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        self._holding.check()
        self._progress(stage, done, total, note)
