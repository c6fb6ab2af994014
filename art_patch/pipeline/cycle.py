"""One cycle of the job, from top to bottom: group -> score -> train -> gate -> promote.

`_cycle` and `_make_candidate` call the steps in order; each step is a file of this folder. A step writes its result to
the store before the next one begins. So if a cycle is killed, the next cycle continues it: it scores groups that were
formed, trains on groups that were scored, and gates a candidate that was published. A cycle changes what serves only by
a promotion, or by a canary test on a share of the sessions. All its other requests to the engine have a lower priority
than the app's calls.

Only one cycle at a time runs on a store, on all machines together (`running_cycle`). Each writes a report to disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from art_patch import training
from art_patch.errors import ArtPatchError, EngineError, JudgeError
from art_patch.pipeline import cycle_run, promote_policy
from art_patch.pipeline.against_upstream import compare_learner
from art_patch.pipeline.carry_over import sweep_leftovers, untested_candidate
from art_patch.pipeline.cycle_run import Cycle, CycleConfig, CycleReport, Outcome, Progress
from art_patch.pipeline.gate_run import run_gate
from art_patch.pipeline.replay_runs import replay
from art_patch.pipeline.resample_turns import resample
from art_patch.pipeline.running_cycle import exclusive_cycle, noting
from art_patch.pipeline.score_groups import ask_first, group, score
from art_patch.pipeline.train_policy import check_can_train, train, why_untestable
from art_patch.rewards import OrderedJudge
from art_patch.serving import EngineClient
from art_patch.store import Store
from art_patch.types import Policy

_STOPPABLE = frozenset({"replay", "resample", "score", "train"})
"""Steps that write their result piece by piece, so they may end between any two units of work."""
_FOREVER_HOURS = 1e9


def retrain(
    store: Store, engine: EngineClient, judge: OrderedJudge, adapters: Path, config: CycleConfig, *,
    gate_judge: OrderedJudge | None = None, who: str, progress: Progress, now: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> CycleReport:  # fmt: skip
    """Run one cycle, from grouping to promotion, and return its report.

    Args:
        gate_judge: decides in the gate; by default `judge` does.
        adapters: directory of the published policies; its parent is the project's directory.
        who: the person or job that the ledger records.
        clock: a clock in seconds with any origin, which measures `max_minutes`.

    Raises:
        Busy: another cycle is running; or another cycle took over this cycle's lease, and this cycle has written
            nothing since then.
        JudgeError: the judge scored nothing; the groups wait for the next cycle.
        TrainingError: the update failed; nothing was published.
        EngineError: the engine failed. If a candidate was already trained, the next cycle gates it.
        ConfigError: this machine or this base model cannot be trained as the configuration says; no training was
            started.
    """
    training.require_permission(config.train)
    began, at = clock(), time.time() if now is None else now
    with (
        exclusive_cycle(store, adapters.parent, who=who) as held,
        noting(adapters.parent, progress, who=who, began_at=at) as noted,
        pruning_at_end(held.store, config, progress, who=who, now=now),
    ):
        limit = _TimeLimit(held.guarding(noted), config.max_minutes, began, clock, {}, [began])
        run = Cycle(held.store, judge, config, limit, at, engine, adapters, who, gate_judge=gate_judge)
        # Read under the lock, so no other cycle can change it. A person still can; the step `promote` looks again.
        champion = run.store.ledger.champion()
        name = champion and champion.name

        def keep(report: CycleReport) -> CycleReport:
            cycle_run.write_report(
                report, adapters.parent, who=who, began_at=at, took_s=clock() - began, stages_s=limit.spent_s
            )
            return report

        try:
            return keep(_cycle(run, champion, limit))
        except _OutOfTime as time_is_up:
            why = f"{time_is_up}; what was done is kept, and the next cycle goes on from here"
            return keep(CycleReport("out of time", why, name, None, run.metrics))
        # A report for errors with a remedy only. Ctrl-C and bugs show themselves to whoever started the cycle.
        except ArtPatchError as error:
            keep(CycleReport("failed", f"{type(error).__name__}: {error}", name, None, run.metrics))
            raise


@contextmanager
def pruning_at_end(
    store: Store, config: CycleConfig, progress: Progress, *, who: str, now: float | None
) -> Generator[None]:
    """Call `prune` when the block ends normally or with an error of art_patch, and not after Ctrl-C or a bug."""
    try:
        yield
    except ArtPatchError:
        # A judge that is down for a month must not keep users' data for a month longer.
        prune(store, config, progress, who=who, now=now)
        _index(store, config)
        raise
    # Not a `finally`: Ctrl-C must end the cycle at once, and pruning a large store takes minutes.
    prune(store, config, progress, who=who, now=now)
    _index(store, config)


def _index(store: Store, config: CycleConfig) -> None:
    """Extend the search index to all calls, or delete it if it is not wanted."""
    if config.search:
        store.search.extend(thorough=True)
    else:
        store.search.drop()


def prune(store: Store, config: CycleConfig, progress: Progress, *, who: str, now: float | None = None) -> None:
    """Delete trajectories older than `keep_days`, and all but the newest `keep_trajectories`; unset limits keep all."""
    if config.keep_days is None and config.keep_trajectories is None:
        return
    store.rights.prune(
        older_than_s=None if config.keep_days is None else config.keep_days * 86_400,
        keep=config.keep_trajectories,
        who=who,
        progress=lambda done, total: progress("prune", done, total),
        now=now,
    )


def _cycle(run: Cycle, champion: Policy | None, limit: _TimeLimit) -> CycleReport:
    ledger, serves = run.store.ledger, champion and champion.name
    challenger = ledger.challenger()
    leader = ledger.leader()
    if leader is None:
        return CycleReport("nothing to do", cycle_run.why_none_serves(run.store), None)
    sweep_leftovers(run, leader)
    if challenger is not None:
        return _look_after_challenger(run, challenger, limit)
    if (busy := _why_not_idle(run)) is not None:
        return CycleReport("not idle", busy, serves)
    # What an earlier cycle trained is gated first: its training was paid for.
    candidate = untested_candidate(run, leader)
    if candidate is None:
        seen = compare_learner(run, leader) if champion is None else None
        if seen is not None and seen.outcome != "learns":
            return seen
        candidate, why_not = _make_candidate(run, leader, limit)
        if candidate is None:
            seen = _compare_present_learner(run, is_final=True) if champion is None else None
            return seen or CycleReport("nothing to do", why_not, serves, None, run.metrics)
    # It passed its gate in an earlier cycle and waits for a person; another gate could only cost more.
    elif run.config.promotion == "approve" and "waits" in candidate.metrics:
        reason = candidate.metrics["waits"]["reason"]
        return promote_policy.waits_for_approval(run, candidate, reason)
    elif (why_not := _why_untestable(run, candidate)) is not None:
        return CycleReport("nothing to do", why_not, serves, candidate.name, run.metrics)
    limit.check()
    ask_first(run)
    if run.gate_judge is not None:
        ask_first(run, run.gate_judge)
    if (refused := promote_policy.load_candidate(run, candidate)) is not None:
        return refused
    verdict = run_gate(run, candidate, leader)
    if champion is None and verdict.seems_better and not verdict.promote:
        seen = compare_learner(run, candidate, gated=verdict)
        learner = ledger.learner()
        if seen is not None and (seen.outcome != "learns" or (learner is not None and learner.name == candidate.name)):
            return seen
        if seen is not None:
            verdict = replace(verdict, reason=seen.reason)
    report = promote_policy.act_on_verdict(run, candidate, leader, verdict)
    if champion is None and report.outcome in ("learns", "rejected"):
        return _compared_too(run, report, leader)
    return report


def _compared_too(run: Cycle, report: CycleReport, leader: Policy) -> CycleReport:
    """Return the report of a gate beside upstream together with the comparison of the learner that it left.

    The candidate was tested against `leader`; of another one, which a person chose meanwhile, it says nothing.
    """
    is_new, learner = report.outcome == "learns", run.store.ledger.learner()
    is_final = not is_new and learner is not None and learner.name == leader.name
    try:
        seen = _compare_present_learner(run, is_final=is_final)
    except (JudgeError, EngineError) as error:
        if is_new:
            raise
        # The candidate's verdict is in the ledger and stands; the next cycle compares the learner.
        return replace(report, reason=f"{report.reason}; the learner was not compared with upstream: {error}")
    if seen is None:
        return report
    if is_new:
        return replace(seen, reason=f"{report.reason}; {seen.reason}")
    reason = f"{report.candidate} is rejected: {report.reason}; {seen.candidate}: {seen.reason}"
    return replace(report if seen.outcome == "learns" else seen, reason=reason)


def _compare_present_learner(run: Cycle, *, is_final: bool) -> CycleReport | None:
    learner = run.store.ledger.learner()
    return None if learner is None else compare_learner(run, learner, is_final=is_final)


def _make_candidate(run: Cycle, leader: Policy, limit: _TimeLimit) -> tuple[Policy | None, str]:
    """Return a new candidate; or `None` and the reason why none was trained."""
    check_can_train(run, leader)
    found = group(run)
    if (found.waiting or found.others) and (run.config.replay is not None or run.config.resample is not None):
        ask_first(run)
    # Replays are siblings of runs that had none, so groups are formed once more. Where upstream is the champion, it
    # would answer them.
    if leader.state == "champion" and (repeated := replay(run, found)):
        found = group(run, repeated)
    limit.check()
    resample(run, leader, found)
    limit.check()
    score(run)
    limit.check()
    return train(run, leader)


def _why_untestable(run: Cycle, candidate: Policy) -> str | None:
    """Return why a candidate cannot be tested yet that was trained on files, maybe before there was any traffic."""
    if "files" not in candidate.metrics.get("train", {}):
        return None
    group(run)
    why = why_untestable(run)
    return None if why is None else f"{candidate.name}, trained on files, waits: {why}"


def _why_not_idle(run: Cycle) -> str | None:
    if (minutes := run.config.idle_minutes) is None:
        return None
    # Bounded on both sides: one call that a wrong clock dated into the future must not block cycles for ever.
    calls = run.store.read.calls_of_apps(since=run.now - minutes * 60, until=run.now + minutes * 60)
    return f"apps made {calls} calls in the last {minutes:g} minutes; the next cycle looks again" if calls else None


def _look_after_challenger(run: Cycle, challenger: Policy, limit: _TimeLimit) -> CycleReport:
    """Decide on the challenger if its test allows it; else judge the traffic of both policies and decide again.

    Nothing is trained meanwhile: a new candidate would be compared with a champion that may be replaced soon.
    """
    # The first look ignores the time limit of the test, because the scores that come next may still decide it. It can
    # reject a bad challenger at once, before the judge is asked.
    patient = replace(run.config.canary, max_hours=_FOREVER_HOURS)
    look = partial(
        promote_policy.watch_once, run.store, run.engine, who=run.who, now=run.now, elapsed_s=limit.elapsed_s
    )
    seen = look(patient)
    unjudged = None
    if seen.outcome == "goes on":
        run.metrics["canary"] = dict(seen.metrics)
        unjudged = _judge_both(run, limit, seen)
        seen = look(run.config.canary)
    if seen.outcome == "nothing to watch":
        decided = promote_policy.decided_elsewhere(run, challenger.name, tested_as=challenger.state)
        return decided or CycleReport("nothing to do", seen.reason, None, challenger.name, run.metrics)
    run.metrics["canary"] = dict(seen.metrics)
    outcomes: dict[str, Outcome] = {
        "goes on": "canary", "rejected": "rejected", "promoted": "promoted", "learns": "learns",
    }  # fmt: skip
    why = f"{challenger.name} is tested as a {seen.state}: {seen.reason}"
    why = f"{why}; not judged: {unjudged}" if unjudged else why
    return CycleReport(outcomes[seen.outcome], why, cycle_run.champion_name(run), challenger.name, run.metrics)


def _judge_both(run: Cycle, limit: _TimeLimit, seen: promote_policy.WatchReport) -> str | None:
    """Group and score the traffic of champion and challenger; return the reason if that was not done, or not whole."""
    # No user sees a shadow's answers, so they have no siblings in the traffic that a judge could compare.
    if seen.state == "shadow":
        return None
    if (busy := _why_not_idle(run)) is not None:
        return busy
    try:
        limit.check()
        group(run)
        limit.check()
        score(run)
    except (_OutOfTime, JudgeError) as error:
        return str(error)
    return None


class _OutOfTime(Exception):
    """`max_minutes` are over, so no further unit of work begins."""


class _TimeLimit(NamedTuple):
    """A progress callback that ends the cycle between two units of work once `max_minutes` are over."""

    progress: Progress
    max_minutes: float | None
    began: float
    clock: Callable[[], float]
    spent_s: dict[str, float]  # by stage: the time up to each of its units, since the unit of any stage before it
    last: list[float]  # one number: when the newest unit ended

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        now = self.clock()
        self.spent_s[stage] = self.spent_s.get(stage, 0.0) + now - self.last[0]
        self.last[0] = now
        self.progress(stage, done, total, note)
        # Not after the last unit: the step has yet to write its metrics, and takes no time any more.
        if stage in _STOPPABLE and done < total:
            self.check()

    def check(self) -> None:
        """Raise `_OutOfTime` if the time is over."""
        if self.max_minutes is not None and self.elapsed_s() >= self.max_minutes * 60:
            raise _OutOfTime(f"{self.max_minutes:g} minutes are over")

    def elapsed_s(self) -> float:
        """Return the seconds since the cycle began."""
        return self.clock() - self.began
