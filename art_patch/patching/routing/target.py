"""Where calls go right now: the app's settings and the store's route put together, once per change, not per call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from art_patch._lib.key_files import engine_key
from art_patch.errors import ConfigError
from art_patch.settings import Settings
from art_patch.types import Mode, Route

_ASKING = frozenset({"route", "canary", "shadow"})

BAD_KEY = "the engine's key cannot be used"

NO_KEY = "none"
"""Sent where the engine asks for no key, because the SDK cannot send nothing."""


# No tuple, although that would be made faster: error reporters walk tuples, and would tell the key.
@dataclass(frozen=True, slots=True)
class Target:
    """What the hot path reads.

    Attributes:
        mode: the mode in force.
        champion: policy that serves, if one does.
        base_url: address of its engine.
        api_key: the engine's key.
        timeout_s: how long the engine may keep a caller waiting.
        first_token_timeout_s: how long it may take to begin a stream.
        connect_timeout_s: how long connecting to it may take.
        canary_percent: share of sessions that it answers in mode `canary`.
        engine_since: when it announced itself; another time is another engine.
        challenger: policy that is tested beside the champion, on the same engine.
        challenger_state: `shadow`, it is asked in the background; `canary`, it answers a share of the sessions.
        challenger_percent: which share of those that a policy answers.
        unknown: why nobody can be asked although the mode is `route`; recorded with the calls that go upstream for it.
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
        """Whether a champion is there to be asked, openly or as a shadow."""
        return self.mode in _ASKING and self.champion is not None and self.base_url is not None

    @property
    def routes(self) -> bool:
        """Whether the champion's answers reach the app."""
        return self.mode != "shadow" and self.serves

    @property
    def canary(self) -> str | None:
        """The challenger, if it answers a share of the sessions."""
        return self.challenger if self.challenger_state == "canary" else None

    @property
    def asks_challenger(self) -> bool:
        """Whether it is the challenger that this target, made for one call, asks in the champion's place."""
        return self.challenger is not None and self.champion == self.challenger


def resolve(settings: Settings, route: Route) -> tuple[Target, ConfigError | None]:
    """Return the target; the store's mode and the app's own address win.

    Also what is wrong with the engine's key: then nobody is asked, as if no engine were there.
    """
    key, refused = None, None
    try:
        if route.champion is not None:
            key = engine_key(route.key_file, settings.directory, settings.engine_key_file)
    except ConfigError as error:
        refused = error
    mode = route.mode or settings.mode
    target = Target(
        mode=mode,
        champion=route.champion,
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
