"""Why a call fell back to upstream, in words for the record, and whether the engine is to blame for it."""

from __future__ import annotations

from art_patch.patching.rewriting.response_rewriter import InvalidAnswer, TooSlow
from art_patch.patching.routing.target import Target

_NOT_THE_ENGINE = frozenset({400, 413, 422})
"""Refusals of this one request; other calls may still go to the engine."""

_UNREADABLE = "the SDK cannot read"


def as_recorded(target: Target, reason: str) -> str:
    """Return the reason as it is recorded: with the challenger's name in front, if that was asked."""
    return f"{target.champion}: {reason}" if target.asks_challenger else reason


def reason(error: Exception) -> str:
    """Return why there is no answer."""
    names = {kind.__name__ for kind in type(error).__mro__}
    status = getattr(error, "status_code", None)
    if isinstance(error, TooSlow):
        return "the engine did not answer in time"
    if isinstance(error, InvalidAnswer):
        return f"the engine's answer is invalid: {error}"
    if isinstance(status, int):
        return f"the engine answered HTTP {status}"
    if is_connect_timeout(error):
        return "the engine cannot be reached in time"
    if "Timeout" in type(error).__name__:
        return "the engine did not answer in time"
    if "APIConnectionError" in names or type(error).__module__.startswith(("httpx", "httpcore")):
        return "the engine cannot be reached"
    return f"{_UNREADABLE} the engine's answer ({type(error).__name__})"


def is_connect_timeout(error: Exception) -> bool:
    """Whether there was no connection in time."""
    return type(error.__cause__).__name__ == "ConnectTimeout"


def is_about_the_engine(error: Exception) -> bool:
    """Whether other calls would fare no better."""
    return getattr(error, "status_code", None) not in _NOT_THE_ENGINE and not reason(error).startswith(_UNREADABLE)
