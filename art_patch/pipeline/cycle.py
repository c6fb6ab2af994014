"""One cycle: group -> replay -> resample -> score -> train -> gate -> promote. `_cycle` is the table of contents.

The stages are pure; `art_patch.pipeline` reads and writes the store around them. Every stage's result is in the store
before the next begins, so a cycle that was killed goes on where it stopped: groups that were formed are scored, groups
that were scored are trained on, a candidate that was published is gated. Serving is touched by one thing only, a
promotion (or a challenger's test on a share of the traffic); what is asked of the engine otherwise waits behind the
app's own calls.

While a challenger is tested on the app's traffic, a cycle trains nothing. It looks after that test: what both policies
answered is grouped and scored as always, so that a project whose users say nothing has more to go by than errors and
latency. The groups are trained on later, as if they had waited.

One cycle runs at a time, on all machines (`cycle_lock`); each leaves a report on disk (`report`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from art_patch.errors import AdapterRejected, ArtPatchError, JudgeError
from art_patch.pipeline.challenger_watch import WatchReport, watch_once
from art_patch.pipeline.cycle_lock import Holding, alone, only_one
from art_patch.pipeline.cycle_run import Cycle, CycleConfig, Progress
from art_patch.pipeline.form_groups import group
from art_patch.pipeline.gate_run import contest_of
from art_patch.pipeline.replay_runs import replay
from art_patch.pipeline.report import CycleReport, Outcome, failed, keep
from art_patch.pipeline.resample_turns import resample
from art_patch.pipeline.retention import retention
from art_patch.pipeline.score_groups import score
from art_patch.pipeline.train_policy import check_can_train, train
from art_patch.pipeline.unfinished import sweep
from art_patch.promotion import challenge, ensure_loaded, promote, reject
from art_patch.rewards import OrderedJudge
from art_patch.serving import Engine
from art_patch.store import Store
from art_patch.types import JSON, Policy, PolicyState

__all__ = ["CycleConfig", "CycleReport", "Outcome", "only_one", "retrain"]

_STOPPABLE = frozenset({"replay", "resample", "score", "train"})
"""Stages that keep what they did piece by piece, so that they may end anywhere."""
_FOREVER_HOURS = 1e9
_OUTCOMES: dict[PolicyState, Outcome] = {
    "shadow": "canary",
    "canary": "canary",
    "champion": "promoted",
    "rejected": "rejected",
}
"""How a cycle ends whose policy somebody else brought into this state."""


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
    clock: Callable[[], float] = time.monotonic,
) -> CycleReport:
    """Run one cycle; at most one runs on a project, and on a store, at a time.

    Args:
        store: where traffic was recorded.
        engine: the serving engine.
        judge: ranks siblings.
        adapters: directory of published policies.
        config: how.
        who: for the ledger.
        progress: told what goes on.
        now: seconds since the epoch.
        clock: seconds since any moment; what `max_minutes` is measured by.

    Raises:
        Busy: if another cycle runs, or took this one for dead and its lease over; nothing was changed since.
        JudgeError: if the judge scored nothing; the groups wait for the next cycle.
        TrainingError: if the update failed; nothing was published.
        EngineError: if the engine failed; a candidate that was trained is gated by the next cycle. One whose adapter
            the engine refuses for good is rejected instead.
        ConfigError: if there is no training here as the config says, or of this base; nothing was done.
    """
    began, at = clock(), time.time() if now is None else now
    with (
        alone(store, adapters.parent, who=who) as holding,
        retention(holding.store, config, progress, who=who, now=now),
    ):
        watch = _Watch(holding, progress, config.max_minutes, began, clock)
        run = Cycle(holding.store, judge, config, watch, at, engine, adapters, who)
        champion = run.store.ledger.champion()
        name = None if champion is None else champion.name
        told = partial(keep, directory=adapters.parent, who=who, began_at=at)
        try:
            report = _cycle(run, champion, watch)
        except _OutOfTime as time_is_up:
            why = f"{time_is_up}; what was done is kept, and the next cycle goes on from here"
            report = CycleReport("out of time", why, name, None, run.metrics)
        except ArtPatchError as error:
            told(failed(error, name, run.metrics), took_s=clock() - began)
            raise
        told(report, took_s=clock() - began)
        return report


def _cycle(run: Cycle, champion: Policy | None, watch: _Watch) -> CycleReport:
    if champion is None:
        return CycleReport("nothing to do", "no policy serves yet; start `art-patch serve --base MODEL`", None)
    sweep(run, champion)
    if (challenger := run.store.ledger.challenger()) is not None:
        return _look_after_challenger(run, challenger, watch)
    if (busy := _why_not_idle(run)) is not None:
        return CycleReport("not idle", busy, champion.name)
    candidate = _left_over(run.store, champion)
    if candidate is None:
        check_can_train(run, champion)
        grouping = group(run)
        if repeated := replay(run, grouping):
            grouping = group(run, repeated)
        watch.check()
        resample(run, champion, grouping)
        watch.check()
        score(run)
        watch.check()
        candidate, why_not = train(run, champion)
        if candidate is None:
            return CycleReport("nothing to do", why_not, champion.name, None, run.metrics)
    elif run.config.promotion == "approve" and "waits" in candidate.metrics:
        return _waits(champion, candidate, candidate.metrics["waits"]["reason"], run)
    watch.check()
    try:
        ensure_loaded(run.engine, candidate.name)
    except AdapterRejected as error:
        if not error.final:
            raise
        # Each later cycle would be refused it, too.
        reason = f"the engine refuses it: {error}"
        reject(run.store.ledger, run.engine, candidate.name, who=run.who, reason=reason)
        return CycleReport("rejected", reason, champion.name, candidate.name, run.metrics)
    verdict = contest_of(run, candidate, champion)
    won, reason, metrics = verdict.promote, verdict.reason, {"gate": verdict.metrics}
    present = run.store.ledger.champion() or champion
    if (decided := _decided(run, candidate.name)) is not None:
        return decided
    if present.name != champion.name:
        won, reason = False, f"{present.name} serves since; it was tested against {champion.name}"
    if won:
        return _act(run, champion, candidate, reason, metrics)
    run.store.ledger.move(candidate.name, "rejected", who=run.who, reason=reason, metrics=metrics)
    run.engine.unload(candidate.name)
    return CycleReport("rejected", reason, present.name, candidate.name, run.metrics)


def _act(run: Cycle, champion: Policy, candidate: Policy, reason: str, metrics: JSON) -> CycleReport:
    """Do with a candidate that won what the project's way of promoting says."""
    ledger, engine = run.store.ledger, run.engine
    if run.config.promotion == "approve":
        ledger.keep_verdict(candidate.name, metrics=metrics, who=run.who, reason=reason, now=run.now)
        return _waits(champion, candidate, reason, run)
    run.progress("promote", 0, 1, candidate.name)
    if run.config.promotion == "canary":
        percent = run.config.canary_percent
        challenge(
            ledger, engine, candidate.name, state="canary", percent=percent, who=run.who, reason=reason, metrics=metrics
        )
        why = f"{reason}; it answers {percent:g} % of the sessions until its test ends"
        report = CycleReport("canary", why, champion.name, candidate.name, run.metrics)
    else:
        promote(ledger, engine, candidate.name, who=run.who, reason=reason, metrics=metrics)
        report = CycleReport("promoted", reason, candidate.name, candidate.name, run.metrics)
    run.progress("promote", 1, 1, candidate.name)
    return report


def _decided(run: Cycle, name: str, *, tested_as: PolicyState = "candidate") -> CycleReport | None:
    """What somebody else made of a policy while it was tested stands; `None` if nobody did."""
    policy, serves = run.store.ledger.policy(name), run.store.ledger.champion()
    if policy is None or policy.state == tested_as:
        return None
    why = f"{name} is {policy.state} since: somebody else decided on it while it was tested"
    outcome = _OUTCOMES.get(policy.state, "nothing to do")
    return CycleReport(outcome, why, serves.name if serves else None, name, run.metrics)


def _look_after_challenger(run: Cycle, challenger: Policy, watch: _Watch) -> CycleReport:
    """Look, judge what both policies answered, and look again: to give a bad one up waits for no judge.

    Meanwhile no other is trained: it would be compared with the wrong champion.
    """
    # That the test's time is up ends it in the second look alone, when the judge has said what there is to say.
    patient = replace(run.config.canary, max_hours=_FOREVER_HOURS)
    seen = watch_once(run.store, run.engine, patient, who=run.who, now=run.now)
    unjudged = None
    if seen.outcome == "goes on":
        run.metrics["canary"] = dict(seen.metrics)
        unjudged = _judge_both(run, watch, seen)
        now = run.now + watch.elapsed_s()
        seen = watch_once(run.store, run.engine, run.config.canary, who=run.who, now=now)
    if seen.outcome == "nothing to watch":
        decided = _decided(run, challenger.name, tested_as=challenger.state)
        return decided or CycleReport("nothing to do", seen.reason, None, challenger.name, run.metrics)
    run.metrics["canary"] = dict(seen.metrics)
    outcomes: dict[str, Outcome] = {"goes on": "canary", "rejected": "rejected", "promoted": "promoted"}
    serves = run.store.ledger.champion()
    why = f"{challenger.name} is tested as a {seen.state}: {seen.reason}"
    return CycleReport(
        outcomes[seen.outcome],
        f"{why}; not judged: {unjudged}" if unjudged else why,
        serves.name if serves else None,
        challenger.name,
        run.metrics,
    )


def _judge_both(run: Cycle, watch: _Watch, seen: WatchReport) -> str | None:
    """Group and score the traffic of both policies; return why not, or why not all of it.

    A shadow's answers come to nobody and have no siblings in the traffic: a judge could say nothing of them.
    """
    if seen.state == "shadow":
        return None
    if (busy := _why_not_idle(run)) is not None:
        return busy
    try:
        watch.check()
        group(run)
        watch.check()
        score(run)
    except (_OutOfTime, JudgeError) as error:
        return str(error)
    return None


def _waits(champion: Policy, candidate: Policy, reason: str, run: Cycle) -> CycleReport:
    todo = f"`art-patch promote {candidate.name}` lets it serve"
    return CycleReport("waits for approval", f"{reason}; {todo}", champion.name, candidate.name, run.metrics)


def _why_not_idle(run: Cycle) -> str | None:
    minutes = run.config.idle_minutes
    if minutes is None:
        return None
    window_s = minutes * 60
    # Bounded on both sides: calls that a clock dated into the future must not keep cycles away for ever.
    calls = run.store.read.calls_of_apps(since=run.now - window_s, until=run.now + window_s)
    return f"apps made {calls} calls in the last {minutes:g} minutes; the next cycle looks again" if calls else None


def _left_over(store: Store, champion: Policy) -> Policy | None:
    """A candidate that an earlier cycle trained from this champion: not gated yet, or waiting for a person."""
    waiting = [p for p in store.ledger.policies() if p.state == "candidate" and p.parent == champion.name and p.path]
    return waiting[-1] if waiting and Path(waiting[-1].path or "").is_dir() else None


class _OutOfTime(Exception):
    """There is no time for another unit of work."""


class _Watch:
    """Told what goes on; ends a cycle that lost its lease, or whose time is up, between two units of work."""

    def __init__(
        self,
        holding: Holding,
        progress: Progress,
        max_minutes: float | None,
        began: float,
        clock: Callable[[], float],
    ) -> None:
        self._holding = holding
        self._progress = progress
        self._max_minutes = max_minutes
        self._began = began
        self._clock = clock

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        self._holding.check()
        self._progress(stage, done, total, note)
        if stage in _STOPPABLE and done < total:
            self.check()

    def check(self) -> None:
        """Pass while there is time."""
        minutes = self._max_minutes
        if minutes is not None and self.elapsed_s() >= minutes * 60:
            raise _OutOfTime(f"{minutes:g} minutes are over")

    def elapsed_s(self) -> float:
        """Return how long the cycle runs by now."""
        return self._clock() - self._began
