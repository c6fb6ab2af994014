"""Changes the state of policies: promotes, tests, rejects them, and rolls back to an earlier champion.

The route (in the store) tells apps which policy to call. It names a new champion only after the engine has proven it:
the engine loads the policy under its own name, lists it, and answers one completion with finite log-probabilities. Then
one transaction makes it champion and changes the route. After that, policies older than those kept for a rollback are
unloaded.

A policy under test is proven in the same way. Ending its test, changing its share and rolling back need no engine,
because the route alone decides which policy apps call.

Every change of state raises `NotFound` if the policy is unknown, and `TransitionError` if the policy's state does not
allow it or another process has changed the state meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Literal

from art_patch import store
from art_patch.errors import AdapterRejected, EngineError, NotFound, TransitionError
from art_patch.serving import EngineClient
from art_patch.types import CHALLENGERS, IMPORTED, JSON, UPSTREAM_ARM, Policy, PolicyState, check_move

# Former champions that stay loaded, so that a rollback need not wait until one is loaded.
KEEP = 2

# Share of the sessions that stays with upstream once a policy has taken its place, unless one was set before.
CONTROL_PERCENT = 5.0


def ensure_loaded(engine: EngineClient, name: str) -> None:
    """Load the policy unless the engine serves it already; prove it by a completion with finite log-probabilities.

    Raises:
        AdapterRejected: the engine refuses the policy for good, or the policy's log-probabilities are not finite.
        EngineError: the engine cannot load the policy now, does not list it, or does not answer under its name.
    """
    if name not in engine.models():
        try:
            engine.load(name)
        except AdapterRejected:
            if name not in engine.models():  # else another process has loaded it meanwhile
                raise
    if name not in engine.models():
        raise EngineError(f"the engine says it loaded {name} but does not list it; restart `art-patch serve`")
    ready = [{"role": "user", "content": "ready?"}]
    answer = engine.chat(model=name, messages=ready, max_tokens=4, temperature=0, logprobs=True, return_token_ids=True)
    content = (answer["choices"][0].get("logprobs") or {}).get("content") or []
    if answer.get("model") != name or not content:
        raise EngineError(f"the engine did not answer as {name}, with log-probabilities; restart `art-patch serve`")
    if not all(math.isfinite(token["logprob"]) for token in content):
        raise AdapterRejected(f"{name} answers with log-probabilities that are no numbers. Train a new candidate")


def promote(
    ledger: store.Ledger, engine: EngineClient, name: str, *, state: Literal["champion", "learner"] = "champion",
    who: str, reason: str, metrics: JSON | None = None, was: PolicyState | None = None, now: float | None = None,
) -> Policy:  # fmt: skip
    """Make a policy champion once the engine serves it, else raise `EngineError`; unload policies no longer needed.

    While upstream is the champion, a policy may be made the learner in the same way. A policy that becomes champion in
    upstream's place begins with a control group.

    A retired policy does not become champion in this way (`TransitionError`): it is tested again, or gone back to. An
    imported candidate is tested first, too. Nor does one that is not what it `was` when the caller decided, or that
    somebody else moves while it is proven.
    """
    was = was or check_promotion(ledger, name, state).state
    ensure_loaded(engine, name)
    policy = ledger.move(
        name, state, who=who, reason=reason, metrics=metrics, was=was, now=now, control_percent=CONTROL_PERCENT
    )
    # The champion has changed, so the promotion has succeeded. The next cycle and the server unload what is left.
    with suppress(EngineError):
        for old in unwanted(ledger, engine.models()):
            engine.unload(old)
    return policy


def control_group_to_come(ledger: store.Ledger) -> float:
    """Return the percentage of the control group that begins if a policy is promoted now; 0 if none begins.

    One begins when a policy takes upstream's place, unless a person has ever set its share.
    """
    return 0.0 if ledger.champion() is not None or ledger.control_shares() else CONTROL_PERCENT


def check_promotion(ledger: store.Ledger, name: str, state: PolicyState, *, percent: float | None = None) -> Policy:
    """Return the policy; raise `NotFound`, or `TransitionError` if it may not become `state` by a promotion.

    For a test, on `percent` of the sessions, also if it cannot begin as things are.
    """
    if (policy := ledger.policy(name)) is None:
        raise NotFound(f"there is no policy {name!r}; `art-patch policies` lists them")
    # Better policies may have come after it, and what users ask may have changed since it served.
    if policy.state == "retired" and state == "champion":
        back = f", or go back to it: `art-patch rollback --to {name}`" if name in ledger.champions() else ""
        raise TransitionError(f"{name} is retired; test it again: `art-patch promote {name} --canary 5`{back}")
    if IMPORTED in policy.metrics and policy.state == "candidate" and state == "champion":
        raise TransitionError(
            f"{name} was imported and no test of this project has seen it; begin with "
            f"`art-patch promote {name} --canary 5`"
        )
    check_move(name, policy.state, state)
    if state in CHALLENGERS:
        ledger.check_test(policy, state, percent)
    return policy


def challenge(
    ledger: store.Ledger, engine: EngineClient, name: str, *, state: Literal["shadow", "canary"],
    percent: float | None = None, who: str, reason: str, metrics: JSON | None = None,
) -> Policy:  # fmt: skip
    """Prove that the engine serves the policy, and test it as `shadow`, or as `canary` on `percent` of the sessions.

    `EngineError` if it cannot be served, and nothing has changed; `ConfigError` if `percent` does not fit the state.
    """
    was = check_promotion(ledger, name, state, percent=percent).state
    ensure_loaded(engine, name)
    return ledger.move(name, state, who=who, reason=reason, metrics=metrics, percent=percent, was=was)


def change_share(ledger: store.Ledger, name: str, percent: float, *, who: str, reason: str) -> Policy:
    """Change a canary's share to `percent` of the sessions; its test goes on, and a larger share keeps its sessions."""
    policy = ledger.policy(name)
    if policy is not None and policy.state != "canary":
        raise TransitionError(f"{name} is {policy.state} and has no share of the sessions; only a canary has one")
    return ledger.move(name, "canary", who=who, reason=reason, percent=percent, was="canary")


def give_up(
    ledger: store.Ledger, engine: EngineClient | None, *, who: str, reason: str, metrics: JSON | None = None
) -> str | None:
    """End the test that is running, so that the champion answers all sessions; return whose, `None` without one."""
    if (challenger := ledger.challenger()) is None:
        return None
    end_test(ledger, engine, challenger.name, who=who, reason=reason, metrics=metrics)
    return challenger.name


def end_test(
    ledger: store.Ledger, engine: EngineClient | None, name: str, *, who: str, reason: str, metrics: JSON | None = None,
    now: float | None = None,
) -> Policy:  # fmt: skip
    """End a policy's test without a promotion as `Ledger.end_test`, and unload what no longer serves."""
    ended = ledger.end_test(name, who=who, reason=reason, metrics=metrics, now=now)
    if ended.state != "learner":
        _unload(ledger, engine, name)
    return ended


def reject(
    ledger: store.Ledger, engine: EngineClient | None, name: str, *, who: str, reason: str, metrics: JSON | None = None
) -> bool:
    """Reject a policy for good, and unload all but the base model; return whether the engine unloaded it."""
    ledger.move(name, "rejected", who=who, reason=reason, metrics=metrics)
    return _unload(ledger, engine, name)


def _unload(ledger: store.Ledger, engine: EngineClient | None, name: str) -> bool:
    if engine is None or name in wanted(ledger):
        return False
    with suppress(EngineError):  # the route no longer names it, and the next promotion tries to unload it again
        engine.unload(name)
        return True
    return False


def rollback(
    ledger: store.Ledger, engine: EngineClient | None, *, to: str | None = None, who: str, reason: str
) -> Policy:
    """Make the previous champion, or `to`, champion again; without an engine (`None`), the next one to run loads it.

    If upstream was the champion before, or is named, upstream answers again, and the champion learns on.

    Raises:
        NotFound: there is no earlier champion, or `to` is none.
        TransitionError: if `to` is the champion already.
        EngineError: a running engine cannot serve the old policy; the champion stays.
    """
    to, champion = rollback_target(ledger, to), ledger.champion()
    if to == UPSTREAM_ARM and champion is not None:
        return ledger.move(champion.name, "learner", who=who, reason=reason)
    # A loaded policy was proven when it was loaded, and its completion would wait behind the bad champion's calls.
    if engine is not None and to not in engine.models():
        ensure_loaded(engine, to)
    return ledger.move(to, "champion", who=who, reason=reason)


def rollback_target(ledger: store.Ledger, to: str | None = None) -> str:
    """Return who would answer after a rollback (to `to`): the name of an earlier champion, or "upstream".

    Raises `NotFound` and `TransitionError` as `rollback`.
    """
    champion = ledger.champion()
    if to is None:
        if champion is not None and ledger.replaced_upstream(champion.name):
            return UPSTREAM_ARM
        if behind := _before(ledger):
            return behind[-1]
        raise NotFound("there is no earlier champion to go back to; `art-patch history` shows what was decided")
    if to == (champion.name if champion is not None else UPSTREAM_ARM):
        raise TransitionError(f"{to} answers already; nothing to do")
    if to == UPSTREAM_ARM:
        return to
    if (policy := ledger.policy(to)) is None:
        raise NotFound(f"there is no policy {to!r}; `art-patch policies` lists them")
    if to not in ledger.champions() or policy.state not in ("retired", "learner"):
        why = "never served" if to not in ledger.champions() else f"is {policy.state}"
        raise TransitionError(f"{to} {why}, so one cannot go back to it; `art-patch promote {to}` begins with a proof")
    return to


def _before(ledger: store.Ledger) -> list[str]:
    """Return the earlier champions that can be rolled back to, in order. A name may come twice."""
    champions = [name for name in ledger.answered() if name is not None]
    return [name for name, after in pairwise(champions) if name != after]


def wanted(ledger: store.Ledger) -> list[str]:
    """Return what an engine should load: champion or learner, base, `KEEP` earlier champions, policy under test."""
    policies = ledger.policies()
    first = [p.name for p in policies if p.state in ("champion", "learner")]
    first += [p.name for p in policies if p.step == 0]
    last = [p.name for p in policies if p.state in CHALLENGERS]
    return list(dict.fromkeys(first + _before(ledger)[-KEEP:] + last))


def unwanted(ledger: store.Ledger, served: Sequence[str]) -> list[str]:
    """Return those of the loaded policies (`served`) that are in this ledger, not `wanted`, and not candidates."""
    keep = set(wanted(ledger))
    return [p.name for p in ledger.policies() if p.name in served and p.name not in keep and p.state != "candidate"]
