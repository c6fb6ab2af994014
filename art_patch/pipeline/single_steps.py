"""Two policies, asked the same -> the gate's verdict on them, and nothing is done about it.

It is the gate's contest, with everything that it checks; `candidate` and `champion` in its metrics are the policy that
is looked at and the one that it is compared with. Nobody is promoted or rejected, no group changes its state. What is
kept is what the judge was asked for and cost. Policies that the engine does not serve are loaded for it and unloaded
when it is over, unless somebody wants them served by then. It is alone on the store, as a cycle is.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from art_patch.errors import ConfigError, EngineError, StoreError
from art_patch.gate import Verdict
from art_patch.pipeline.cycle_lock import alone
from art_patch.pipeline.cycle_run import Cycle, CycleConfig, Progress
from art_patch.pipeline.gate_run import contest_of
from art_patch.promotion import wanted
from art_patch.rewards import OrderedJudge
from art_patch.serving import Engine
from art_patch.store import Store
from art_patch.types import Policy


def evaluate(
    store: Store,
    engine: Engine,
    judge: OrderedJudge,
    adapters: Path,
    config: CycleConfig,
    policy: str,
    against: str | None = None,
    *,
    who: str,
    progress: Progress,
    now: float | None = None,
) -> tuple[str, Verdict]:
    """Compare a policy with another on held-out scenarios.

    Args:
        store: where traffic was recorded and grouped.
        engine: the serving engine.
        judge: ranks their answers.
        adapters: directory of published policies.
        config: how; of a cycle's, the gate, the checks, the rewards and what may be run again.
        policy: which one.
        against: the other; the champion unless given.
        who: for the audit log.
        progress: told what goes on.
        now: seconds since the epoch.

    Returns:
        The name of the other, and the verdict: `promote` says whether the policy is better.

    Raises:
        Busy: a cycle runs.
        ConfigError: a policy is compared with itself.
        StoreError: there is no such policy, or no champion.
        EngineError: the engine failed, or cannot serve one of them.
        JudgeError: the judge scored nothing in one of the orders.
    """
    with alone(store, adapters.parent, who=who) as holding:

        def told(stage: str, done: int, total: int, note: str = "") -> None:
            holding.check()
            progress(stage, done, total, note)

        ours, theirs = _policies(holding.store, policy, against)
        at = time.time() if now is None else now
        run = Cycle(holding.store, judge, config, told, at, engine, adapters, who)
        with _borrowing(run, ours.name, theirs.name):
            return theirs.name, contest_of(run, ours, theirs)


def _policies(store: Store, policy: str, against: str | None) -> tuple[Policy, Policy]:
    champion = store.ledger.champion()
    other = against or (champion.name if champion else None)
    if other is None:
        raise StoreError("no policy serves yet, so there is none to compare with; start `art-patch serve --base MODEL`")
    if policy == other:
        raise ConfigError(f"{policy} cannot be compared with itself; name another with --against")
    found = [store.ledger.policy(name) for name in (policy, other)]
    for name, each in zip((policy, other), found, strict=True):
        if each is None:
            raise StoreError(f"there is no policy {name!r}; `art-patch policies` lists them")
    ours, theirs = (each for each in found if each is not None)
    return ours, theirs


@contextmanager
def _borrowing(run: Cycle, *names: str) -> Generator[None]:
    """Unload at the end which of them was not served before, unless somebody has promoted it meanwhile."""
    served = run.engine.models()
    try:
        yield
    finally:
        kept = {*served, *wanted(run.store.ledger)}
        for name in (name for name in names if name not in kept):
            with suppress(EngineError):  # an engine that failed says so already; or it was never loaded
                run.engine.unload(name)
