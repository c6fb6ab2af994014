"""What people decide about a policy: promote, test, reject, and go back. For the commands and the page of these names.

Each function checks all that can be checked first, and changes nothing in a `dry_run`. The engine is needed where the
policy must be proven; a rejection and the way back must work while it is down.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from art_patch import promotion, store, types
from art_patch.errors import ArtPatchError, ConfigError, EngineError, TransitionError
from art_patch.serving import EngineClient
from art_patch.settings import Settings


@dataclass(frozen=True, slots=True)
class Promoted:
    """A policy that was made champion, or is tested now."""

    policy: types.Policy  # as it was before
    state: types.PolicyState
    percent: float | None  # share of the sessions of a canary
    control_percent: float  # of the control group that there is, or begins
    champion: str | None  # after the change; `None`: upstream
    before: str | None  # the champion before


@dataclass(frozen=True, slots=True)
class Rejected:
    """A policy that was rejected."""

    was: types.PolicyState
    unloaded: bool  # by the engine
    champion: str | None


@dataclass(frozen=True, slots=True)
class RolledBack:
    """Who answers after a rollback; the same as `before` if only a test has ended, or nothing was to be done."""

    target: str  # a policy, or "upstream"
    before: str
    test_ended: str | None
    state: types.PolicyState | None  # of the policy whose test has ended


def find_engine(settings: Settings, ledger: store.Ledger, *, within_s: float = 5.0) -> EngineClient | None:
    """Return a client of the project's engine, or `None` if the engine does not answer within `within_s`."""
    engine = EngineClient.of_route(settings, ledger.route())
    return engine if engine is not None and engine.health(timeout_s=within_s) else None


def unload(settings: Settings, ledger: store.Ledger, rejected: str) -> bool:
    """Ask the engine to unload a policy that gets no more calls; return whether it did."""
    # Nothing is lost if this fails: the next promotion unloads what is not wanted.
    with suppress(ConfigError, EngineError):
        if (engine := find_engine(settings, ledger)) is not None:
            engine.unload(rejected)
            return True
    return False


def promote_named(
    settings: Settings, ledger: store.Ledger, policy: str, *, percent: float | None = None, shadow: bool = False,
    who: str, reason: str | None = None, dry_run: bool = False,
) -> Promoted:  # fmt: skip
    """Make a policy champion; or test it on `percent` of the sessions or as a `shadow`; or change a canary's share.

    Raises `ConfigError` for a share that is none, `EngineError` without an engine, and what `promotion` raises.
    """
    if shadow and percent is not None:
        raise ConfigError("--canary and --shadow exclude each other; a shadow can become a canary later")
    if percent is not None and not 0 < percent <= 100:
        raise ConfigError(f"--canary {percent:g} is no share of the sessions; give a percentage above 0 and up to 100")
    state = "shadow" if shadow else "champion" if percent is None else "canary"
    route = ledger.route()
    control = route.control_percent or promotion.control_group_to_come(ledger)
    is_canary = percent is not None and (route.challenger, route.challenger_state) == (policy, "canary")
    chosen = promotion.check_promotion(ledger, policy, state, percent=percent)
    done = "promoted" if state == "champion" else "its share changed" if is_canary else "tested"
    why = reason or f"{done} by hand"
    if is_canary and percent is not None:
        # The engine serves a canary already; only its share in the route changes.
        if not dry_run:
            promotion.change_share(ledger, policy, percent, who=who, reason=why)
    elif (engine := find_engine(settings, ledger)) is None:
        raise EngineError("no engine is running, so the policy cannot be proven; start `art-patch serve` and try again")
    elif dry_run:
        pass  # whether the engine can serve it, only loading it shows
    elif state != "champion":
        promotion.challenge(ledger, engine, policy, state=state, percent=percent, who=who, reason=why)
    else:
        promotion.promote(ledger, engine, policy, who=who, reason=why)
    champion = policy if state == "champion" else ledger.route().champion
    return Promoted(chosen, state, percent, control, champion, route.champion)


def reject_named(
    settings: Settings, ledger: store.Ledger, policy: str, *, who: str, reason: str, dry_run: bool = False
) -> Rejected:
    """Reject a policy for good; a running engine unloads it."""
    was, unloaded = promotion.check_promotion(ledger, policy, "rejected").state, False
    if not dry_run:
        # Before the engine is asked, for the same reason as in a rollback.
        promotion.reject(ledger, None, policy, who=who, reason=reason)
        unloaded = policy not in promotion.wanted(ledger) and unload(settings, ledger, policy)
    return Rejected(was, unloaded, ledger.route().champion)


def roll_back(
    settings: Settings, ledger: store.Ledger, *, to: str | None = None, who: str, reason: str, dry_run: bool = False
) -> RolledBack:
    """End the test if there is one, else let the champion before answer again, or `to`: a policy, or "upstream"."""
    before, tested = _answering(ledger), ledger.challenger()
    # From upstream nobody goes back to a policy unasked: a second rollback would undo the first.
    stays = to == before or (to is None and (tested is not None or before == types.UPSTREAM_ARM))
    # First of all: what cannot be gone back to is refused before anything is changed.
    target = before if stays else promotion.rollback_target(ledger, to)
    if dry_run:
        ended = tested.name if tested else None
        state = ledger.after_test(ended) if ended else None
    else:
        ended = _go_back(settings, ledger, target, who=who, reason=reason)
        policy = ledger.policy(ended) if ended else None
        state = policy.state if policy else None
    return RolledBack(target, before, ended, state)


def _answering(ledger: store.Ledger) -> str:
    champion = ledger.champion()
    return champion.name if champion is not None else types.UPSTREAM_ARM


def _go_back(settings: Settings, ledger: store.Ledger, to: str, *, who: str, reason: str) -> str | None:
    """End the test, if there is one, and let `to` answer; return the name of the policy whose test has ended."""
    # The ledger comes first: an engine that hangs must not delay what takes a bad policy off the traffic.
    ended = None
    with suppress(TransitionError):  # somebody else has just ended it, or promoted the policy
        ended = promotion.give_up(ledger, None, who=who, reason=reason)
    # So also if a server has promoted the tested policy in this moment.
    if _answering(ledger) != to:
        try:
            # A rollback is urgent: an engine that takes longer than a second is not waited for.
            promotion.rollback(ledger, find_engine(settings, ledger, within_s=1.0), to=to, who=who, reason=reason)
        except ArtPatchError as error:
            if ended is not None:
                error.args = (f"the test of {ended} has ended, but {to} does not answer yet: {error}",)
            raise
    if ended is not None and ended not in promotion.wanted(ledger):
        unload(settings, ledger, ended)
    return ended
