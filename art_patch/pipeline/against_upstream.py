"""Compares the learner with upstream's recorded answers, and begins its canary test once it is as good.

Where upstream's answers are on record, upstream is the champion: a base that `art-patch serve` starts is the learner.
It answers nobody. Each cycle trains a candidate from it, and a candidate that is better becomes the learner. Then this
comparison, on held-out prompts that upstream answered, says whether it may be tested on the app's sessions: it must be
proven to be worse by at most `CanaryConfig.max_loss`. A candidate that only seems better than the learner is compared
with upstream, too: near the ceiling none can be proven better than a learner that is already good. It takes the
learner's place if it is as good as upstream.

"Worse by at most `max_loss`" lets a policy through that is a little worse. So a learner that is not proven better than
upstream, and whose last update still gained as much as `max_loss`, is trained once more before its canary test: an
update costs a night, and the users have upstream's answers meanwhile.

A learner is compared again only if that may tell something new: upstream's model has changed since, or there are as
many more prompts as the last comparison lacked.
"""

from dataclasses import replace
from typing import Any

from art_patch import gate
from art_patch.pipeline import promote_policy
from art_patch.pipeline.cycle_run import Cycle, CycleReport
from art_patch.pipeline.gate_run import held_out_for, run_gate
from art_patch.pipeline.score_groups import ask_first
from art_patch.store import Store
from art_patch.types import JSON, Policy

KEY = "upstream_gate"
"""Name of this comparison in a policy's metrics and in the cycle's report."""

MOST_SCENARIOS = 400  # a learner that needs more prompts than this waits for updates to make it better

FAR_BELOW = 0.2
"""A learner that scores this much less than upstream had better imitate its answers first."""

_WAITS = "its last update gained {:.3f}, so another one comes before its test on the app's sessions"


def compare_learner(
    run: Cycle, learner: Policy, *, gated: gate.Verdict | None = None, is_final: bool = False
) -> CycleReport | None:
    """Compare the learner with upstream, and test it as a canary if it is as good; `None` if there is nothing new.

    A candidate (`learner`), of which the gate's verdict `gated` says that it seems better than the learner, becomes the
    learner if it is as good as upstream. `is_final`: this cycle has no better policy, so none is waited for.
    """
    if run.teacher is not None and run.gate_judge is None:
        run.metrics["upstream"] = {
            "left": "upstream's answers have no tokens that a teacher can read; name a --gate-judge"
        }
        return None
    last: dict[str, Any] = learner.metrics.get(KEY) or {}
    if (bounds := _scenarios_to_ask(run, last)) is None:
        return _begin_late(run, learner, last, is_final=is_final)
    least, most = bounds
    config = replace(run.config.gate, margin=-run.config.canary.max_loss, max_scenarios=most)
    turns = held_out_for(run, config, seed=learner.step, of_upstream=True).turns
    if len({turn.scenario_key for turn in turns}) < least:
        return None
    ask_first(run, run.gate_judge)
    verdict = run_gate(run, learner, None, config)
    # Users who are too few for the gate are no obstacle to a canary, which compares sessions.
    passed = verdict.promote or verdict.needs_canary
    reason = f"against upstream, it {verdict.reason}"
    metrics = {KEY: dict(verdict.metrics) | {"passed": passed, "reason": verdict.reason, "at": run.now}}
    ledger = run.store.ledger
    if (decided := promote_policy.decided_elsewhere(run, learner.name, tested_as=learner.state)) is not None:
        return decided
    if gated is not None:
        reason = f"{gated.reason}; {'it is the learner now; ' if passed else ''}{reason}"
        metrics["gate"] = dict(gated.metrics)
        if passed:
            # Without this comparison: if the canary cannot begin now, the next cycle is to compare it again.
            told = {"gate": metrics["gate"]}
            ledger.move(learner.name, "learner", who=run.who, reason=reason, metrics=told)
    gained = 0.0 if is_final else _still_gained(run, metrics.get("gate") or learner.metrics.get("gate"), verdict)
    if passed and gained:
        metrics[KEY]["gained"] = gained
        ledger.keep_metrics(learner.name, metrics=metrics)
        reason = f"upstream answers; {reason}; {_WAITS.format(gained)}"
        return CycleReport("learns", reason, None, learner.name, run.metrics)
    if passed and run.config.promotion != "approve":
        return promote_policy.begin_canary(run, learner, reason, metrics, None)
    ledger.keep_metrics(learner.name, metrics=metrics)
    if passed:
        return _waits_for_approval(run, learner, reason)
    if verdict.metrics.get("difference", 0.0) < -FAR_BELOW:
        reason += f"; far below: {_imitation(run, learner)}"
    return CycleReport("learns", f"upstream answers; {reason}", None, learner.name, run.metrics)


def _still_gained(run: Cycle, gated: JSON | None, verdict: gate.Verdict) -> float:
    """Return what the last update gained if another one comes before the test on sessions; 0 if none does."""
    # A person who approves sees the gain, and decides.
    if not gated or run.config.promotion == "approve" or verdict.metrics.get("lower_bound", 0.0) > 0:
        return 0.0
    gained: float = gated.get("difference", 0.0)
    return gained if gained >= run.config.canary.max_loss else 0.0


def _begin_late(run: Cycle, learner: Policy, last: dict[str, Any], *, is_final: bool) -> CycleReport | None:
    """Test a learner that waited, for a person or for a better one, and need not any more; else return `None`.

    It waits for a better one during one cycle, also if that cycle fails: training that is broken must not hold it up.
    """
    ledger, asks = run.store.ledger, run.config.promotion == "approve"
    waits, is_over = "gained" in last, is_final or "tried" in last
    if not last["passed"] or (asks and not waits):
        return None
    moves = ledger.history(limit=None, policy=learner.name)
    if any(it["to_state"] == "canary" and it["at"] >= last["at"] for it in moves):
        return None  # its test on sessions has spoken
    if waits and not is_over and not asks:
        ledger.keep_metrics(learner.name, metrics={KEY: last | {"tried": True}})
        return None
    reason = f"against upstream, it {last['reason']}"
    told = {KEY: {name: value for name, value in last.items() if name not in ("gained", "tried")}}
    if asks:
        ledger.keep_metrics(learner.name, metrics=told)
        return _waits_for_approval(run, learner, reason)
    return promote_policy.begin_canary(run, learner, reason, told, None)


def _waits_for_approval(run: Cycle, learner: Policy, reason: str) -> CycleReport:
    share = f"{run.config.canary_percent:g}"
    todo = f"`art-patch promote {learner.name} --canary {share}` tests it on {share} % of the sessions"
    return CycleReport("waits for approval", f"{reason}; {todo}", None, learner.name, run.metrics)


def _imitation(run: Cycle, learner: Policy) -> str:
    """Return what it would take to learn from upstream's answers first."""
    recorded = run.store.read.counts()
    answers = recorded["calls"] - recorded["calls_by_policy"]
    trained: JSON = learner.metrics.get("train", {})
    took_s, rows = trained.get("took_s"), trained.get("trained_rows")
    cost = f", about {took_s / rows * answers / 60:,.0f} minutes of training" if took_s and rows else ""
    return (
        "`art-patch retrain --imitate-from 0.8` first imitates upstream's answers in runs with such a reward, if "
        f"`--imitate-models` allows it; {answers} answers are on record{cost}, and no judge is asked for it"
    )


def standing(store: Store, *, min_scenarios: int) -> JSON | None:
    """Return how far the learner is from a test beside upstream, for people; `None` if no policy learns.

    `scenarios` are held-out scenarios that upstream's present models answered; the first comparison with these models
    needs `min_scenarios`.
    """
    if (learner := store.ledger.learner()) is None:
        return None
    since = store.evidence.upstream_since() or 0.0
    last: dict[str, Any] = learner.metrics.get(KEY) or {}
    if last and last["at"] < since:
        last = {}
    known = {
        name: last[name] for name in ("candidate", "champion", "more_needed", "passed", "gained", "at") if name in last
    }
    scenarios = store.read.held_out_of_upstream(since=since)
    return {"policy": learner.name, "scenarios": scenarios, "min_scenarios": min_scenarios} | known


def what_is_missing(standing: JSON) -> str:
    """Return `standing` in words."""
    if "at" not in standing:
        here, least = standing["scenarios"], standing["min_scenarios"]
        if here < least:
            return f"not compared with upstream yet: {here} of {least} held-out scenarios are there"
        return "not compared with upstream yet; the next `art-patch retrain` does"
    scores = ""
    if "candidate" in standing:
        scores = f"{standing['candidate']:.3f} against upstream's {standing['champion']:.3f}; "
    if standing["passed"] and "gained" in standing:
        return f"{scores}as good by the judge; {_WAITS.format(standing['gained'])}"
    if standing["passed"]:
        return f"{scores}as good by the judge, and not proven on the app's sessions; updates go on"
    if more := standing.get("more_needed"):
        return f"{scores}not proven; as it looks, {more} more held-out scenarios or a better policy would show it"
    return f"{scores}a better policy is needed"


def _scenarios_to_ask(run: Cycle, last: dict[str, Any]) -> tuple[int, int] | None:
    """Return how many scenarios the next comparison asks, at least and at most; `None` if it would tell nothing new."""
    # What was proven may be less than a limit that was set since.
    proves_too_little = last.get("passed") and last.get("lower_bound", 0.0) <= -run.config.canary.max_loss
    if not last or proves_too_little or last["at"] < (run.store.evidence.upstream_since() or 0.0):
        return run.config.gate.min_scenarios, run.config.gate.max_scenarios
    more, asked = last.get("more_needed"), last.get("scenarios", 0)
    if last["passed"] or not more or asked + more > MOST_SCENARIOS:
        return None
    return asked + more, asked + more
