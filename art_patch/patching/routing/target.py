"""Computes the target (engine, policies, mode) of calls from the app's settings and the route in the store.

This happens once for each change of the route, not in each call.
"""

from dataclasses import dataclass, field
from typing import Literal

from art_patch._lib.key_files import engine_key
from art_patch.errors import ConfigError
from art_patch.settings import Settings
from art_patch.types import Mode, Route

_ASKING = frozenset({"route", "canary", "shadow"})

BAD_KEY = "the engine's key cannot be used"

# Sent to an engine that needs no key, because the SDK cannot send none.
NO_KEY = "none"


# Not a tuple, although making one is faster: error reporters show the items of tuples, which would reveal the key.
@dataclass(frozen=True, slots=True)
class Target:
    """The engine, policies and mode for calls. It is immutable, so that a call uses the same values from start to end.

    Attributes:
        mode: the current mode: that of the store, or the app's own if the store has none.
        champion: name of the policy that serves.
        canary_percent: percentage of sessions that the champion answers in mode `canary`.
        engine_since: time at which the engine wrote its address to the store; a new time means that a new engine runs
            at the same address.
        challenger: name of the policy under test (canary or shadow), on the same engine.
        challenger_percent: percentage of the sessions answered by policies that go to the canary.
        unknown: reason why no policy can be asked although the mode is `route`. Calls that go upstream because of it
            have this reason in their record.
    """

    mode: Mode
    champion: str | None
    base_url: str | None
    api_key: str = field(default=NO_KEY, repr=False)
    timeout_s: float = 30.0
    first_token_timeout_s: float = 2.0
    connect_timeout_s: float = 0.25
    canary_percent: float = 0.0
    engine_since: float | None = None
    challenger: str | None = None
    challenger_state: Literal["shadow", "canary"] | None = None
    challenger_percent: float = 0.0
    unknown: str | None = None

    @property
    def serves(self) -> bool:
        """Whether a champion can be asked: for the app's answers, or in mode `shadow` in the background."""
        return self.mode in _ASKING and self.champion is not None and self.base_url is not None

    @property
    def routes(self) -> bool:
        """Whether the champion's answers are given to the app."""
        return self.mode != "shadow" and self.serves

    @property
    def canary(self) -> str | None:
        """Name of the policy under test if it answers a share of the sessions; else `None`."""
        return self.challenger if self.challenger_state == "canary" else None

    @property
    def asks_challenger(self) -> bool:
        """Whether a call with this target goes to the canary: `RoutedCall` makes a copy with the canary as champion."""
        return self.challenger is not None and self.champion == self.challenger


def resolve(settings: Settings, route: Route) -> tuple[Target, ConfigError | None]:
    """Return the target, and the error if the engine's key file is unusable; that target then asks no policy."""
    key = refused = None
    try:
        if route.champion is not None:
            key = engine_key(route.key_file, settings.directory, settings.engine_key_file)
    except ConfigError as error:
        refused = error
    # The store wins over the app's settings, so that a rollback needs no new deployment.
    mode = route.mode or settings.mode
    target = Target(
        mode=mode,
        champion=route.champion,
        # The app's own address wins: it may reach the engine by another name than the job does.
        base_url=None if refused else settings.base_url or route.base_url,
        api_key=key or NO_KEY,
        timeout_s=settings.timeout_s,
        first_token_timeout_s=settings.first_token_timeout_s,
        connect_timeout_s=settings.connect_timeout_s,
        canary_percent=settings.canary_percent if route.canary_percent is None else route.canary_percent,
        engine_since=route.engine_since,
        challenger=route.challenger,
        challenger_state=route.challenger_state,
        challenger_percent=route.challenger_percent or 0.0,
        unknown=BAD_KEY if refused and mode == "route" else None,
    )
    return target, refused
