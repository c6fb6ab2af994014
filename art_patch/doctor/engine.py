"""Checks of what calls meet: the mode, the champion, its engine, the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from art_patch.doctor.finding import Finding
from art_patch.errors import ArtPatchError
from art_patch.types import Route

START = "art-patch serve --base MODEL"

_SKEW_S = 60.0
_BEFORE_US = 1_735_689_600.0  # 2025-01-01: no clock that is right says less


class Engine(Protocol):
    """What the checks ask an engine."""

    def health(self) -> bool:
        """Whether it answers."""
        ...

    def models(self) -> Sequence[str]:
        """What it serves."""
        ...

    def chat(self, **body: Any) -> dict[str, Any]:
        """One chat completion; body and answer are OpenAI's JSON."""
        ...


def mode(own: str, source: str, route: Route) -> Finding:
    """Which mode is in force, and who says so."""
    if route.mode is not None:
        percent = "" if route.canary_percent is None else f" at {route.canary_percent:g} %"
        return Finding("mode", "ok", f"{route.mode}{percent}, set in the store by `art-patch mode`")
    said = {"environment": "from ART_PATCH_MODE", "argument": "from --mode"}.get(source, "the default")
    return Finding("mode", "ok", f"{own}, {said}; each app may say otherwise in patch()")


def champion(route: Route) -> Finding:
    """Who serves."""
    if route.champion is None:
        return Finding("champion", "ok", "none yet: calls go upstream and are recorded")
    return Finding("champion", "ok", route.champion)


def engine(route: Route, base_url: str | None, connect: Callable[[str, str | None], Engine]) -> Finding:
    """Whether the champion's engine answers, and serves it and the policy that is tested.

    Args:
        route: what the store says.
        base_url: what the settings say instead.
        connect: makes a client from an address and the name of a key file.
    """
    address = base_url or route.base_url
    if address is None:
        if route.champion is None:
            return Finding("engine", "ok", "none is running, and none is needed yet")
        return Finding("engine", "warn", f"none is running: calls for {route.champion} go upstream", START)
    try:
        client = connect(address, route.key_file)
        if not client.health():
            return Finding("engine", "bad", f"{address} does not answer: calls go upstream", START)
        names = client.models()
    except ArtPatchError as error:
        return Finding("engine", "bad", " ".join(str(error).split()), START)
    except ValueError:
        return Finding("engine", "bad", f"{address} is not an engine: it answers with no JSON", START)
    if route.champion is not None and route.champion not in names:
        shown = ", ".join(names) or "nothing"
        text = f"{address} serves {shown}, and not the champion {route.champion}: calls go upstream"
        return Finding("engine", "bad", text, "restart `art-patch serve`, which loads the champion")
    if route.challenger is not None and route.challenger not in names:
        text = f"{address} does not serve {route.challenger}, which is tested: what is meant for it goes upstream"
        return Finding("engine", "warn", text, "art-patch rollback")
    return Finding("engine", "ok", f"{address} answers and serves {route.champion or ', '.join(names)}")


def clock(now: float, last_call_at: float | None) -> Finding:
    """Whether the time can be right; runs settle, and keys sort, by it.

    Args:
        now: what the clock says.
        last_call_at: when the newest recorded call began.
    """
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < _BEFORE_US:
        return Finding("clock", "bad", f"{shown} cannot be right", "set the clock")
    if last_call_at is not None and last_call_at > now + _SKEW_S:
        ahead = last_call_at - now
        text = f"{shown}; the newest call was recorded {ahead:.0f} s in the future"
        return Finding("clock", "bad", text, "let all machines of the project take their time from the network (NTP)")
    return Finding("clock", "ok", shown)
