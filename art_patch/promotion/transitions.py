"""Making a policy serve or be tested, and going back. The route turns only after the engine has proven the policy.

Order: load under its own name -> listed -> one canary completion with finite log-probabilities -> the ledger moves it
to champion and flips the route in one transaction -> policies older than the two kept for rollback are unloaded.
Apps follow the route within their poll interval; until then they ask for the old name, which is still loaded.

A challenger, tested in the background (`shadow`) or by a share of the sessions (`canary`), goes the same way. To give
it up, to change its share, or to go back, no engine is needed: the route alone decides whom apps ask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, Protocol

from art_patch.errors import AdapterRejected, EngineError, StoreError, TransitionError
from art_patch.serving import Engine
from art_patch.types import CHALLENGERS, JSON, Policy, PolicyState

KEEP = 2
"""Retired policies that stay loaded for rollback."""


class Ledger(Protocol):
    """What promotion asks of the store (`store.ledger.Ledger`)."""

    def policies(self) -> tuple[Policy, ...]:
        """Every policy, oldest first."""
        ...

    def policy(self, name: str) -> Policy | None:
        """The policy of this name."""
        ...

    def champion(self) -> Policy | None:
        """The policy that serves."""
        ...

    def champions(self) -> Sequence[str]:
        """Who became champion, one after the other."""
        ...

    def challenger(self) -> Policy | None:
        """The policy that is tested beside the champion."""
        ...

    def move(
        self,
        name: str,
        state: PolicyState,
        *,
        who: str,
        reason: str,
        metrics: JSON | None = None,
        percent: float | None = None,
        now: float | None = None,
    ) -> Policy:
        """Move a policy to another state."""
        ...


def ensure_loaded(engine: Engine, name: str) -> None:
    """Load the policy unless it is served, and prove it: listed, and one completion with finite log-probabilities.

    Raises:
        AdapterRejected: if the engine refuses it, for good, or it computes nonsense.
        EngineError: if the engine cannot load it now, does not list it, or answers with nonsense.
    """
    if name not in engine.models():
        try:
            engine.load(name)
        except AdapterRejected:
            if name not in engine.models():  # else somebody else has loaded it meanwhile
                raise
    if name not in engine.models():
        raise EngineError(f"the engine says it loaded {name} but does not list it; restart `art-patch serve`")
    answer = engine.chat(
        model=name,
        messages=[{"role": "user", "content": "ready?"}],
        max_tokens=4,
        temperature=0,
        logprobs=True,
        return_token_ids=True,
    )
    content = (answer["choices"][0].get("logprobs") or {}).get("content") or []
    if answer.get("model") != name or not content:
        raise EngineError(f"the engine did not answer as {name}, with log-probabilities; restart `art-patch serve`")
    if not all(math.isfinite(token["logprob"]) for token in content):
        raise AdapterRejected(f"{name} did not pass its canary completion. Train a new candidate")


def promote(ledger: Ledger, engine: Engine, name: str, *, who: str, reason: str, metrics: JSON | None = None) -> Policy:
    """Make the policy champion.

    Raises:
        EngineError: if the engine cannot serve it; the champion stays.
        StoreError: if there is no such policy.
        TransitionError: if it may not become champion.
    """
    _check_known(ledger, name)
    ensure_loaded(engine, name)
    policy = ledger.move(name, "champion", who=who, reason=reason, metrics=metrics)
    for old in unwanted(ledger, engine.models()):
        engine.unload(old)
    return policy


def challenge(
    ledger: Ledger,
    engine: Engine,
    name: str,
    *,
    state: Literal["shadow", "canary"],
    percent: float | None = None,
    who: str,
    reason: str,
    metrics: JSON | None = None,
) -> Policy:
    """Test the policy on the app's traffic, beside the champion; `percent` of the sessions are a canary's.

    Raises:
        EngineError: if the engine cannot serve it; nothing changed.
        StoreError: if there is no such policy.
        TransitionError: if it may not be tested, or another one is.
        ConfigError: if a canary comes without its share, or a shadow with one.
    """
    _check_known(ledger, name)
    ensure_loaded(engine, name)
    return ledger.move(name, state, who=who, reason=reason, metrics=metrics, percent=percent)


def change_share(ledger: Ledger, name: str, percent: float, *, who: str, reason: str) -> Policy:
    """Let a canary answer another share of the sessions; its test goes on, and no engine is needed: it is served.

    Sessions are chosen by a hash, so a canary that gets more of them keeps those that it has.

    Raises:
        StoreError: if there is no such policy.
        TransitionError: if it is no canary any more, or has this share already.
        ConfigError: if it is no share.
    """
    policy = ledger.policy(name)
    if policy is not None and policy.state != "canary":
        raise TransitionError(f"{name} is {policy.state} and has no share of the sessions; only a canary has one")
    return ledger.move(name, "canary", who=who, reason=reason, percent=percent)


def give_up(ledger: Ledger, engine: Engine | None, *, who: str, reason: str, metrics: JSON | None = None) -> str | None:
    """Reject the challenger, so that the champion answers all sessions; with the engine down, too.

    Returns:
        Its name; `None` if nothing is being tested.

    Raises:
        TransitionError: if somebody else has just promoted it.
    """
    challenger = ledger.challenger()
    if challenger is None:
        return None
    reject(ledger, engine, challenger.name, who=who, reason=reason, metrics=metrics)
    return challenger.name


def reject(
    ledger: Ledger, engine: Engine | None, name: str, *, who: str, reason: str, metrics: JSON | None = None
) -> bool:
    """Give a policy up for good: it never serves again, is never tested, and nobody goes back to it.

    Works without an engine. One that is up lets it go, except the base model, which every policy stands on.

    Returns:
        Whether the engine let it go.

    Raises:
        StoreError: if there is no such policy.
        TransitionError: if it serves, or is rejected already.
    """
    ledger.move(name, "rejected", who=who, reason=reason, metrics=metrics)
    if engine is None or name in wanted(ledger):
        return False
    with suppress(EngineError):  # nobody is sent there any more; the next promotion unloads it otherwise
        engine.unload(name)
        return True
    return False


def rollback(ledger: Ledger, engine: Engine | None, *, who: str, reason: str) -> Policy:
    """Go back to the champion that this one replaced.

    Works without an engine: it then serves the old one when it is back. A policy that is served still was proven when
    it was loaded, and is not made to answer again: that would wait in line behind the calls of a champion that harms.

    Raises:
        StoreError: if there is nothing to go back to.
        EngineError: if an engine is up and cannot serve the old policy; the champion stays.
    """
    if not (behind := _before(ledger)):
        raise StoreError("there is no earlier champion to go back to; `art-patch history` shows what was decided")
    if engine is not None and behind[-1] not in engine.models():
        ensure_loaded(engine, behind[-1])
    return ledger.move(behind[-1], "champion", who=who, reason=reason)


def _check_known(ledger: Ledger, name: str) -> None:
    if ledger.policy(name) is None:
        raise StoreError(f"there is no policy {name!r}; `art-patch policies` lists them")


def _before(ledger: Ledger) -> list[str]:
    """Return the policies that one can go back to, step by step from the end; a name may come again.

    Each champion stands on the one that it replaced; who is gone back from stands there no more.
    """
    gone = {policy.name for policy in ledger.policies() if policy.state == "rejected"}
    stack: list[str] = []
    for name in (name for name in ledger.champions() if name not in gone):
        if stack[-2:-1] == [name]:
            stack.pop()
        else:
            stack.append(name)
    return stack[:-1]


def wanted(ledger: Ledger) -> list[str]:
    """Return the policies an engine should hold: champion, step 0, whom one would go back to, last the challenger."""
    policies = ledger.policies()
    first = [p.name for p in policies if p.state == "champion"] + [p.name for p in policies if p.step == 0]
    last = [p.name for p in policies if p.state in CHALLENGERS]
    return list(dict.fromkeys(first + _before(ledger)[-KEEP:] + last))


def unwanted(ledger: Ledger, served: Sequence[str]) -> list[str]:
    """Return the served policies of this store that nobody needs any more."""
    keep = set(wanted(ledger))
    return [p.name for p in ledger.policies() if p.name in served and p.name not in keep and p.state != "candidate"]
