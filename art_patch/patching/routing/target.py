"""Resolves where calls go now, from the app's settings and the store's route: once per change, not per call."""

from __future__ import annotations

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
    """Where a call may go. It is immutable, so a call sees one state from start to end.

    Attributes:
        mode: the mode in force.
        champion: name of the policy that serves.
        base_url: address of the engine.
        canary_percent: share of sessions that the champion answers in mode `canary`.
        engine_since: when the engine announced itself. Another time means another engine at the same address.
        challenger: name of the policy that is tested beside the champion, on the same engine.
        challenger_state: `shadow` asks the challenger in the background, `canary` lets it answer a share of the
            sessions.
        challenger_percent: that share, of the sessions that a policy answers.
        unknown: why no policy can be asked although the mode is `route`. Calls that go upstream for it are recorded
            with it.
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
        """Whether there is a champion to ask, for the app or in the background."""
        return self.mode in _ASKING and self.champion is not None and self.base_url is not None

    @property
    def routes(self) -> bool:
        """Whether the answers of the champion reach the app."""
        return self.mode != "shadow" and self.serves

    @property
    def canary(self) -> str | None:
        """The challenger, if it answers a share of the sessions; else `None`."""
        return self.challenger if self.challenger_state == "canary" else None

    @property
    def asks_challenger(self) -> bool:
        """Whether this target asks the challenger.

        A copy made for one call has the challenger in the champion's place.
        """
        return self.challenger is not None and self.champion == self.challenger


def resolve(settings: Settings, route: Route) -> tuple[Target, ConfigError | None]:
    """Return the target, and the error if the engine's key cannot be used. Without a key, no policy is asked."""
    key, refused = None, None
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
