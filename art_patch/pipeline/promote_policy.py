"""Looking after a challenger: the store's calls and scores -> a verdict -> the ledger.

`watch_once` is one look and what follows from it; `watch` looks again and again, which `art-patch serve` does beside
serving and `art-patch watch` by itself. Several may look at once: the ledger takes one decision on a policy, and who
comes second learns that it is taken. Giving a challenger up needs no engine, promoting it does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from threading import Event
from typing import Any, Literal

from art_patch.errors import ArtPatchError, EngineError, TransitionError
from art_patch.promotion import CanaryConfig, WatchVerdict, decide, evidence_of, promote
from art_patch.serving import Engine
from art_patch.store import Store
from art_patch.types import JSON

EVERY_S = 5.0
"""Seconds between two looks."""
_REST = 20
"""After a look nothing is done for at least so many times as long as it took."""

Outcome = Literal["nothing to watch", "goes on", "rejected", "promoted"]

log = logging.getLogger("art_patch.watch")


@dataclass(frozen=True, slots=True)
class WatchReport:
    """What one look found and did.

    Attributes:
        outcome: what became of the challenger.
        reason: why, in words.
        challenger: the policy that is tested, or was until now.
        champion: the policy that it was compared with.
        state: the challenger's when the look began.
        percent: share of the sessions that it answered.
        metrics: of both arms and every signal.
    """

    outcome: Outcome
    reason: str
    challenger: str | None = None
    champion: str | None = None
    state: Literal["shadow", "canary"] | None = None
    percent: float | None = None
    metrics: JSON = field(default_factory=dict[str, Any])

    def as_json(self) -> dict[str, Any]:
        """Return it as one JSON object."""
        return asdict(self)


def watch_once(
    store: Store, engine: Engine | None, config: CanaryConfig, *, who: str, now: float | None = None
) -> WatchReport:
    """Look at the challenger once, and give it up or promote it if that is due.

    Args:
        store: where traffic was recorded.
        engine: proves a challenger before it is promoted; `None` if none is up, and then nothing is promoted.
        config: when a challenger is given up, and when it has won.
        who: for the ledger.
        now: seconds since the epoch.

    Raises:
        StoreError: the store cannot be read or written.
        EngineError: the challenger has won, and the engine cannot serve it; it goes on being tested.
    """
    at = time.time() if now is None else now
    route = store.ledger.route()
    challenger, champion, state = route.challenger, route.champion, route.challenger_state
    if challenger is None or champion is None or state is None or route.challenger_since is None:
        return WatchReport("nothing to watch", "no policy is tested beside the champion", champion=champion)
    traffic = store.arm_traffic(challenger=challenger, champion=champion, state=state, since=route.challenger_since)
    evidence = evidence_of(traffic, challenger=challenger, champion=champion, state=state)
    verdict = decide(evidence, state=state, hours=(at - route.challenger_since) / 3600, config=config)
    try:
        outcome, reason = _act(store, engine, challenger, verdict, who=who, at=at)
    except TransitionError as error:
        outcome, reason = "nothing to watch", f"it was decided by somebody else meanwhile: {error}"
    return WatchReport(outcome, reason, challenger, champion, state, route.challenger_percent, verdict.metrics)


def _act(
    store: Store, engine: Engine | None, challenger: str, verdict: WatchVerdict, *, who: str, at: float
) -> tuple[Outcome, str]:
    metrics = {"watch": dict(verdict.metrics) | {"verdict": verdict.action}}
    if verdict.action == "go on":
        return "goes on", verdict.reason
    if verdict.action == "promote":
        if engine is None:
            return "goes on", f"it has won, and no engine is up to prove it: {verdict.reason}"
        promote(store.ledger, engine, challenger, who=who, reason=verdict.reason, metrics=metrics)
        return "promoted", verdict.reason
    store.ledger.move(challenger, "rejected", who=who, reason=verdict.reason, metrics=metrics, now=at)
    if engine is not None:
        with suppress(EngineError):  # no app is sent there any more; the next promotion unloads it otherwise
            engine.unload(challenger)
    return "rejected", verdict.reason


def watch(
    store: Store,
    engine: Engine | None,
    config: CanaryConfig,
    *,
    who: str,
    stop: Event,
    every_s: float = EVERY_S,
    on_report: Callable[[WatchReport], None] | None = None,
) -> None:
    """Look again and again until `stop` is set. What goes wrong is logged once, and the next look tries again.

    Args:
        store: as in `watch_once`.
        engine: as in `watch_once`.
        config: as in `watch_once`.
        who: for the ledger.
        stop: ends it.
        every_s: seconds between two looks; more where a look takes long.
        on_report: given what each look found.
    """
    trouble = ""
    while not stop.is_set():
        began = time.perf_counter()
        try:
            report = watch_once(store, engine, config, who=who)
        except ArtPatchError as error:
            if str(error) != trouble:  # a server that is down for the night is one line
                log.warning("the challenger was not looked at: %s", error)
            trouble = str(error)
        else:
            trouble = ""
            if report.outcome in ("rejected", "promoted"):
                log.warning("%s was %s: %s", report.challenger, report.outcome, report.reason)
            if on_report is not None:
                on_report(report)
        stop.wait(max(every_s, _REST * (time.perf_counter() - began)))
