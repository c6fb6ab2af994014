"""The step `promote`: acts on the gate's verdict, and decides about a policy under test on the app's traffic.

The policy under test, a canary or a shadow, is named `challenger` in the code. `art-patch serve`, `art-patch watch` and
every cycle compare it with the champion, each in its own process. The ledger accepts one decision on a policy. A
process that decides later changes nothing, and reports that another one has decided.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Any, Literal

from art_patch import gate, promotion
from art_patch.errors import AdapterRejected, ArtPatchError, TransitionError
from art_patch.pipeline.carry_over import marks
from art_patch.pipeline.cycle_run import Cycle, CycleReport, Outcome, champion_name
from art_patch.serving import EngineClient
from art_patch.store import Store
from art_patch.types import CONTINUABLE, JSON, UPSTREAM_ARM, Policy, PolicyState, Route

EVERY_S = 5.0  # seconds between two comparisons of the policy under test with the champion
CONTROL_EVERY_S = 300.0  # seconds between two comparisons of the champion with the control group
_REST = 20  # a look at a large store may take seconds; the pause after it is at least this many times as long

# `learns`: upstream goes on to answer all sessions, and the policy is trained on.
WatchOutcome = Literal["nothing to watch", "goes on", "rejected", "promoted", "learns"]

_WOULD = {
    "promote": "; a running `art-patch serve` promotes it, and so does `art-patch watch --act`",
    "roll back": "; a running `art-patch serve` ends the test, and so does `art-patch watch --act`",
}
"""Verdict that decides -> what the reason says as well if nothing is done about it."""

log = logging.getLogger("art_patch.watch")

_OUTCOMES: dict[PolicyState, Outcome] = {
    "learner": "learns",
    "shadow": "canary",
    "canary": "canary",
    "champion": "promoted",
    "rejected": "rejected",
}
"""State that another process gave to the cycle's policy -> outcome of the cycle."""


def load_candidate(run: Cycle, candidate: Policy) -> CycleReport | None:
    """Load the candidate; return a report if it is refused for good, raise `EngineError` if it cannot be loaded now."""
    try:
        promotion.ensure_loaded(run.engine, candidate.name)
    except AdapterRejected as error:
        if not error.final:
            raise
        # It would be refused in every later cycle too, and nothing else could be trained until then.
        reason = f"the engine refuses it: {error}"
        promotion.reject(run.store.ledger, run.engine, candidate.name, who=run.who, reason=reason)
        return CycleReport("rejected", reason, champion_name(run), candidate.name, run.metrics)
    return None


def act_on_verdict(run: Cycle, candidate: Policy, champion: Policy, verdict: gate.Verdict) -> CycleReport:
    """Promote, test or reject the candidate as the gate's verdict and the configuration say; return the cycle's report.

    A candidate is rejected if the champion has changed since the gate began: it was compared with the old one.
    """
    # Users who are too few for the gate are no obstacle to a canary, which compares sessions.
    won = verdict.promote or (verdict.needs_canary and run.config.promotion == "canary")
    reason, metrics = verdict.reason, {"gate": verdict.metrics}
    gated_at = [p.created_at for p in run.store.ledger.policies() if "gate" in p.metrics or p.name == candidate.name]
    if (yearly := gate.false_promotions(gated_at, run.config.gate.level)) is not None:
        metrics = {"gate": dict(verdict.metrics) | {"runs_a_year": yearly[0], "false_promotions_a_year": yearly[1]}}
        run.metrics["gate"] = metrics["gate"]
        reason += f"; {yearly[0]:.0f} gate runs a year promote {yearly[1]:.1f} policies by chance if none is better"
    # A gate takes minutes to hours. Meanwhile a person may have promoted, rejected or rolled back by command.
    if (decided := decided_elsewhere(run, candidate.name)) is not None:
        return decided
    present = run.store.ledger.leader() or champion
    # The verdict proves nothing about the present champion.
    if present.name != champion.name:
        won, reason = False, f"{present.name} is {present.state} since; it was tested against {champion.name}"
    if won:
        return _promote(run, champion, candidate, reason, metrics)
    if run.config.train.start == "candidate" and verdict.seems_better and present.name == champion.name:
        told = marks(candidate)
        metrics = {"gate": dict(metrics["gate"]) | told}
        where = "it seems better, so updates go on from there"
        if not told[CONTINUABLE]:
            where = f"it seems better, but is far from what {champion.name} answers, so updates go on from before it"
        reason += f"; {where}"
    promotion.reject(run.store.ledger, run.engine, candidate.name, who=run.who, reason=reason, metrics=metrics)
    return CycleReport("rejected", reason, champion_name(run), candidate.name, run.metrics)


def _promote(run: Cycle, champion: Policy, candidate: Policy, reason: str, metrics: JSON) -> CycleReport:
    """Treat a candidate that passed the gate as `CycleConfig.promotion` says."""
    ledger, engine = run.store.ledger, run.engine
    if ledger.champion() is None:
        # It is better than the learner. Whether it may serve, the comparison with upstream says.
        why = f"better than {champion.name}: {reason}"
        ledger.move(candidate.name, "learner", who=run.who, reason=why, metrics=metrics)
        return CycleReport("learns", f"{why}; it is the learner now", None, candidate.name, run.metrics)
    if run.config.promotion == "approve":
        # The state stays `candidate`; the verdict in the ledger keeps the next cycle from gating it again.
        ledger.keep_verdict(candidate.name, metrics=metrics, who=run.who, reason=reason, now=run.now)
        return waits_for_approval(run, candidate, reason)
    # This also checks the lease: a cycle that lost it during the gate must not promote.
    run.progress("promote", 0, 1, candidate.name)
    if run.config.promotion == "canary":
        report = begin_canary(run, candidate, reason, metrics, champion.name)
    else:
        promotion.promote(ledger, engine, candidate.name, who=run.who, reason=reason, metrics=metrics)
        report = CycleReport("promoted", reason, candidate.name, candidate.name, run.metrics)
    run.progress("promote", 1, 1, candidate.name)
    return report


def begin_canary(run: Cycle, policy: Policy, reason: str, metrics: JSON, champion: str | None) -> CycleReport:
    """Test a policy on a share of the sessions, beside the champion, or beside upstream (`None`)."""
    percent, how = run.config.canary_percent, {"who": run.who, "reason": reason}
    ledger, engine = run.store.ledger, run.engine
    promotion.challenge(ledger, engine, policy.name, state="canary", percent=percent, metrics=metrics, **how)
    why = f"{reason}; it answers {percent:g} % of the sessions until its test ends"
    return CycleReport("canary", why, champion, policy.name, run.metrics)


def waits_for_approval(run: Cycle, candidate: Policy, reason: str) -> CycleReport:
    """Return the report of a cycle whose candidate passed the gate and waits for a person's approval."""
    todo = f"`art-patch promote {candidate.name}` lets it serve"
    return CycleReport("waits for approval", f"{reason}; {todo}", champion_name(run), candidate.name, run.metrics)


def decided_elsewhere(run: Cycle, name: str, *, tested_as: PolicyState = "candidate") -> CycleReport | None:
    """Return a report if a person or another process has changed the policy's state since its test began; or `None`."""
    policy = run.store.ledger.policy(name)
    if policy is None or policy.state == tested_as:
        return None
    why = f"{name} is {policy.state} since: somebody else decided on it while it was tested"
    outcome = _OUTCOMES.get(policy.state, "nothing to do")
    return CycleReport(outcome, why, champion_name(run), name, run.metrics)


@dataclass(frozen=True, slots=True)
class WatchReport:
    """The result of one comparison of the policy under test (`challenger`) with the champion."""

    outcome: WatchOutcome
    reason: str
    challenger: str | None = None  # also if this comparison ended its test
    champion: str | None = None  # `None`: upstream
    state: Literal["shadow", "canary"] | None = None  # of the challenger, before the comparison
    percent: float | None = None  # share of the sessions that the challenger answers
    metrics: JSON = field(default_factory=dict[str, Any])  # of both policies, and of the test on each signal


def watch_once(
    store: Store, engine: EngineClient | None, config: promotion.CanaryConfig, *, who: str, act: bool = True,
    now: float | None = None, elapsed_s: Callable[[], float] = lambda: 0.0,
) -> WatchReport:  # fmt: skip
    """Compare the policy under test with the champion on all traffic so far; promote or reject it if that is decided.

    Without `act` nothing is changed, and the reason says what would be.

    Without a champion it is compared with upstream, and may be worse by at most `CanaryConfig.max_loss`. Once it has
    won, the control group begins, unless the operator has set its share.

    Only a promotion needs the `engine`. Without one (`None`) a policy that has won stays under test, as it does if the
    engine cannot serve it, which raises `EngineError`. `elapsed_s` tells what has passed since `now`.
    """
    at = time.time() if now is None else now + elapsed_s()

    def moved_at() -> float | None:
        # Not `at`: a look takes seconds, in which sessions go on to be assigned as before.
        return None if now is None else now + elapsed_s()

    look = _look(store, config, at)
    if look is None:
        return _no_test(store.ledger.route())
    if not act:
        return look.report
    # Two processes may reach this line with the same verdict. The ledger refuses the second move.
    try:
        outcome, reason = _act_on_watch(store, engine, look.challenger, look.state, look.verdict, who, moved_at)
    except TransitionError as error:
        outcome, reason = "nothing to watch", f"it was decided by somebody else meanwhile: {error}"
    return replace(look.report, outcome=outcome, reason=reason)


def look_without_acting(
    store: Store, config: promotion.CanaryConfig, *, now: float
) -> tuple[WatchReport, dict[str, list[promotion.Proof]]]:
    """Return what `watch_once` reports without acting, and for each signal how its proofs grew; nothing is changed."""
    look = _look(store, config, now)
    if look is None:
        return _no_test(store.ledger.route()), {}
    return look.report, promotion.proofs_over_time(look.evidence, look.config)


@dataclass(frozen=True, slots=True)
class _Look:
    challenger: str
    champion: str | None
    state: Literal["shadow", "canary"]
    percent: float | None
    evidence: promotion.Evidence
    config: promotion.CanaryConfig
    verdict: promotion.WatchVerdict

    @property
    def report(self) -> WatchReport:
        """The report if nothing is done about the verdict."""
        reason = self.verdict.reason + _WOULD.get(self.verdict.action, "")
        metrics = self.verdict.metrics
        return WatchReport("goes on", reason, self.challenger, self.champion, self.state, self.percent, metrics)


def _look(store: Store, config: promotion.CanaryConfig, at: float) -> _Look | None:
    """Compare the policy under test with the champion on all traffic so far; `None` if none is tested."""
    route = store.ledger.route()
    challenger, champion, state = route.challenger, route.champion, route.challenger_state
    if challenger is None or state is None or route.challenger_since is None:
        return None
    traffic = store.evidence.arm_traffic(
        challenger=challenger, champion=champion, state=state, since=route.challenger_since
    )
    times = {"rest_s": config.rest_s, "silence_s": config.silence_s}
    rival = champion or UPSTREAM_ARM
    evidence = promotion.evidence_of(traffic, challenger=challenger, champion=rival, state=state, now=at, **times)
    if champion is None:
        config = config.against_upstream
    hours = (at - route.challenger_since) / 3600
    verdict = promotion.with_gains(promotion.decide(evidence, state=state, hours=hours, config=config), evidence)
    return _Look(challenger, champion, state, route.challenger_percent, evidence, config, verdict)


def _no_test(route: Route) -> WatchReport:
    return WatchReport("nothing to watch", "no policy is tested beside the champion", champion=route.champion)


def control_once(
    store: Store, config: promotion.CanaryConfig, *, who: str, now: float | None = None
) -> promotion.WatchVerdict | None:
    """Compare the champion with the control group; if it is proven worse, upstream answers again, and it learns on.

    Return the verdict; `None` if nothing is compared, for lack of a champion or of a control group, or if somebody else
    has replaced the champion meanwhile.
    """
    at = time.time() if now is None else now
    route = store.ledger.route()
    if route.champion is None or not route.control_percent:
        return None
    traffic = store.evidence.control_traffic(champion=route.champion, now=at)
    evidence = promotion.evidence_of(
        traffic, challenger=route.champion, champion=UPSTREAM_ARM, state="canary", now=at,
        rest_s=config.rest_s, silence_s=config.silence_s,
    )  # fmt: skip
    verdict = promotion.decide_control(evidence, begin=traffic.shares[0][0], config=config)
    notices = promotion.notices(evidence, now=at)
    verdict = replace(verdict, metrics={**verdict.metrics, "days_to_notice": notices})
    look = {"at": at, "policy": route.champion, "says": verdict.reason, **verdict.metrics}
    store.ledger.keep_control_look(look)
    if verdict.action == "roll back":
        reason = f"worse than upstream, which answers from now on: {verdict.reason}"
        metrics = {"control": verdict.metrics}
        try:
            store.ledger.move(route.champion, "learner", who=who, reason=reason, metrics=metrics, now=at)
        except TransitionError:
            return None
    return verdict


def _act_on_watch(
    store: Store, engine: EngineClient | None, challenger: str, state: PolicyState, verdict: promotion.WatchVerdict,
    who: str, moved_at: Callable[[], float | None],
) -> tuple[WatchOutcome, str]:  # fmt: skip
    metrics = {"watch": dict(verdict.metrics) | {"verdict": verdict.action}}
    if verdict.action == "go on":
        if verdict.percent is not None:
            store.ledger.move(
                challenger, "canary", who=who, reason=verdict.reason, percent=verdict.percent, was="canary",
                now=moved_at(),
            )  # fmt: skip
        return "goes on", verdict.reason
    if verdict.action == "promote":
        if engine is None:
            return "goes on", f"it has won, and no engine is up to prove it: {verdict.reason}"
        promotion.promote(
            store.ledger, engine, challenger, was=state, who=who, reason=verdict.reason, metrics=metrics, now=moved_at()
        )
        return "promoted", verdict.reason
    # The end of a test needs no engine: apps follow the route in the store. So a bad challenger is stopped even now.
    ended = promotion.end_test(
        store.ledger, engine, challenger, who=who, reason=verdict.reason, metrics=metrics, now=moved_at()
    )
    return "learns" if ended.state == "learner" else "rejected", verdict.reason


def watch(
    store: Store, engine: EngineClient | None, config: promotion.CanaryConfig, *, who: str, stop: Event,
    act: bool = True, every_s: float = EVERY_S, on_report: Callable[[WatchReport], None] | None = None,
) -> None:  # fmt: skip
    """Call `watch_once` every `every_s` seconds until `stop` is set; the pause is longer if a call takes long.

    Unless it only looks (without `act`), it also calls `control_once` every `CONTROL_EVERY_S` seconds.

    `on_report` receives the report of each call. An error is logged once, and the next call tries again.
    """
    trouble, control_at = "", 0.0
    while not stop.is_set():
        pause_s = every_s
        try:
            # First, and with a pause of its own: neither an engine that fails the challenger nor a long look at one of
            # the two may keep the other from being looked at.
            if (began := time.monotonic()) >= control_at and act:
                control_at = began + CONTROL_EVERY_S
                verdict = control_once(store, config, who=who)
                if verdict is not None and verdict.action == "roll back":
                    log.warning("upstream answers again: %s", verdict.reason)
                control_at = max(control_at, time.monotonic() + _REST * (time.monotonic() - began))
            began = time.monotonic()
            report = watch_once(store, engine, config, who=who, act=act)
        except ArtPatchError as error:
            # A server that is down for the night is one line, and one that is being stopped is none.
            if str(error) != trouble and not stop.is_set():
                log.warning("the challenger was not looked at: %s", error)
            trouble = str(error)
        else:
            trouble = ""
            # A verdict is acted upon, which takes the engine's time and says nothing about the next look's.
            if report.outcome not in ("rejected", "promoted", "learns"):
                pause_s = max(every_s, _REST * (time.monotonic() - began))
            if on_report is not None:
                on_report(report)
        stop.wait(pause_s)
