"""Where calls go right now: the app's settings and the store's route put together, once per change, not per call."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from art_patch.records import Mode, Route
from art_patch.settings import Settings

NO_KEY = "none"
"""Sent where the engine asks for no key, because the SDK cannot send nothing."""


@dataclass(frozen=True, slots=True)
class Target:
    """What the hot path reads.

    Attributes:
        mode: the mode in force.
        champion: policy that serves, if one does.
        base_url: address of its engine.
        api_key: the engine's key.
        timeout_s: how long the engine may keep a caller waiting.
        connect_timeout_s: how long connecting to it may take.
    """

    mode: Mode
    champion: str | None
    base_url: str | None
    api_key: str = field(default=NO_KEY, repr=False)
    timeout_s: float = 30.0
    connect_timeout_s: float = 0.25

    @property
    def serves(self) -> bool:
        """Whether calls are meant for a champion."""
        return self.mode == "route" and self.champion is not None and self.base_url is not None


def resolve(settings: Settings, route: Route) -> Target:
    """Return the target; the store's mode and the app's own address win.

    Raises:
        OSError: if the engine's key file cannot be read.
    """
    key = Path(route.key_file).read_text().strip() if route.key_file is not None and route.champion else ""
    return Target(
        mode=route.mode or settings.mode,
        champion=route.champion,
        base_url=settings.base_url or route.base_url,
        api_key=key or NO_KEY,
        timeout_s=settings.timeout_s,
        connect_timeout_s=settings.connect_timeout_s,
    )
