"""One cycle: group -> replay -> resample -> score -> train -> gate -> promote. `retrain` is the table of contents.

The stages are pure; `art_patch.stages` reads and writes the store around them. Every stage's result is in the store
before the next begins, so a cycle that was killed goes on where it stopped: groups that were formed are scored, groups
that were scored are trained on, a candidate that was published is gated. Serving is touched by one thing only, a
promotion; what is asked of the engine otherwise waits behind the app's own calls.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from art_patch.errors import Busy
from art_patch.promotion.promote import promote
from art_patch.records import JSON, Policy
from art_patch.rewards.batch import OrderedJudge
from art_patch.serving.contract import Engine
from art_patch.stages.contest import contest_of
from art_patch.stages.group import group
from art_patch.stages.replay import replay
from art_patch.stages.resample import resample
from art_patch.stages.retention import retention
from art_patch.stages.run import Cycle, CycleConfig, Progress
from art_patch.stages.score import score
from art_patch.stages.train import train
from art_patch.store import Store

__all__ = ["CycleConfig", "CycleReport", "Outcome", "only_one", "retrain"]

Outcome = Literal["promoted", "rejected", "nothing to do"]


@dataclass(frozen=True, slots=True)
class CycleReport:
    """What a cycle did.

    Attributes:
        outcome: `promoted`, `rejected` or `nothing to do`.
        reason: why, in words.
        champion: who serves now.
        candidate: the policy that was trained, if any.
        figures: of every stage that ran.
    """

    outcome: Outcome
    reason: str
    champion: str | None
    candidate: str | None = None
    figures: JSON = field(default_factory=dict[str, Any])


def retrain(
    store: Store,
    engine: Engine,
    judge: OrderedJudge,
    adapters: Path,
    config: CycleConfig,
    *,
    who: str,
    progress: Progress,
    now: float | None = None,
) -> CycleReport:
    """Run one cycle; at most one runs on a project at a time.

    Args:
        store: where traffic was recorded.
        engine: the serving engine.
        judge: ranks siblings.
        adapters: directory of published policies.
        config: how.
        who: for the ledger.
        progress: told what goes on.
        now: seconds since the epoch.

    Raises:
        Busy: if another cycle runs.
        JudgeError: if the judge scored nothing; the groups wait for the next cycle.
        TrainingError: if the update failed; nothing was published.
        EngineError: if the engine failed; a candidate that was trained is gated by the next cycle.
    """
    with only_one(adapters.parent), retention(store, config, progress, who=who, now=now):
        champion = store.ledger.champion()
        if champion is None:
            return CycleReport("nothing to do", "no policy serves yet; start `art-patch serve --base MODEL`", None)
        at = time.time() if now is None else now
        run = Cycle(store, judge, config, progress, at, engine, adapters, who)
        figures = run.figures
        candidate = _left_over(store, champion)
        if candidate is None:
            grouping = group(run)
            if repeated := replay(run, grouping):
                grouping = group(run, repeated)
            resample(run, champion, grouping)
            score(run)
            candidate, why_not = train(run, champion)
            if candidate is None:
                return CycleReport("nothing to do", why_not, champion.name, None, figures)
        verdict = contest_of(run, candidate, champion)
        if not verdict.promote:
            store.ledger.move(
                candidate.name, "rejected", who=who, reason=verdict.reason, figures={"gate": verdict.figures}
            )
            engine.unload(candidate.name)
            return CycleReport("rejected", verdict.reason, champion.name, candidate.name, figures)
        progress("promote", 0, 1, candidate.name)
        promote(store.ledger, engine, candidate.name, who=who, reason=verdict.reason, figures={"gate": verdict.figures})
        progress("promote", 1, 1, candidate.name)
        return CycleReport("promoted", verdict.reason, candidate.name, candidate.name, figures)


@contextmanager
def only_one(directory: Path) -> Generator[None]:
    """Hold the project's cycle lock; the kernel frees it if we are killed.

    Raises:
        Busy: if another process holds it.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = FileLock(directory / "cycle.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise Busy(
            f"another cycle is running on {directory}; this one did nothing. Try again when it is done"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _left_over(store: Store, champion: Policy) -> Policy | None:
    """A candidate that an earlier cycle trained from this champion and did not live to gate."""
    waiting = [p for p in store.ledger.policies() if p.state == "candidate" and p.parent == champion.name and p.path]
    return waiting[-1] if waiting and Path(waiting[-1].path or "").is_dir() else None
