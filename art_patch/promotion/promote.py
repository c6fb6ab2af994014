"""Making a policy serve, and going back. The route is flipped only after the engine has proven the policy.

Order: load under its own name -> listed -> one canary completion with finite log-probabilities -> the ledger moves it
to champion and flips the route in one transaction -> policies older than the two kept for rollback are unloaded.
Apps follow the route within their poll interval; until then they ask for the old name, which is still loaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from art_patch.errors import EngineError, StoreError
from art_patch.records import JSON, Policy, PolicyState
from art_patch.serving.contract import Engine

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

    def move(
        self,
        name: str,
        state: PolicyState,
        *,
        who: str,
        reason: str,
        figures: JSON | None = None,
        now: float | None = None,
    ) -> Policy:
        """Move a policy to another state."""
        ...


def ensure_loaded(engine: Engine, name: str) -> None:
    """Load the policy unless it is served, and prove it: listed, and one completion with finite log-probabilities.

    Raises:
        EngineError: if the engine refuses it, does not list it, or answers with nonsense.
    """
    if name not in engine.models():
        engine.load(name)
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
    if answer.get("model") != name or not content or not all(math.isfinite(token["logprob"]) for token in content):
        raise EngineError(f"{name} did not pass its canary completion; it was not promoted. Train a new candidate")


def promote(ledger: Ledger, engine: Engine, name: str, *, who: str, reason: str, figures: JSON | None = None) -> Policy:
    """Make the policy champion.

    Raises:
        EngineError: if the engine cannot serve it; the champion stays.
        StoreError: if there is no such policy.
        TransitionError: if it may not become champion.
    """
    if ledger.policy(name) is None:
        raise StoreError(f"there is no policy {name!r}; `art-patch status` lists them")
    ensure_loaded(engine, name)
    policy = ledger.move(name, "champion", who=who, reason=reason, figures=figures)
    for old in unwanted(ledger, engine.models()):
        engine.unload(old)
    return policy


def rollback(ledger: Ledger, engine: Engine | None, *, who: str, reason: str) -> Policy:
    """Go back to the champion before this one. Works without an engine: it then serves the old one when it is back.

    Raises:
        StoreError: if there is nothing to go back to.
        EngineError: if an engine is up and cannot serve the old policy; the champion stays.
    """
    champion = ledger.champion()
    before = _champion_before(ledger, champion)
    if champion is None or before is None:
        raise StoreError("there is no earlier champion to go back to; `art-patch status` shows the history")
    if engine is not None:
        ensure_loaded(engine, before)
    return ledger.move(before, "champion", who=who, reason=reason)


def _champion_before(ledger: Ledger, champion: Policy | None) -> str | None:
    """The policy that the present champion replaced; after a rollback, the one that *that* champion had replaced."""
    if champion is None:
        return None
    return next(
        (
            policy.name
            for policy in sorted(ledger.policies(), key=lambda p: p.step, reverse=True)
            if policy.state == "retired" and policy.model == champion.model and policy.step < champion.step
        ),
        None,
    )


def wanted(ledger: Ledger) -> list[str]:
    """Return the policies an engine should hold: the champion and the newest retired ones, step 0 always."""
    policies = ledger.policies()
    retired = sorted((p for p in policies if p.state == "retired" and p.step), key=lambda p: p.step)
    return [p.name for p in policies if p.state == "champion" or p.step == 0] + [p.name for p in retired[-KEEP:]]


def unwanted(ledger: Ledger, served: Sequence[str]) -> list[str]:
    """Return the served policies of this store that nobody needs any more."""
    keep = set(wanted(ledger))
    return [p.name for p in ledger.policies() if p.name in served and p.name not in keep and p.state != "candidate"]
