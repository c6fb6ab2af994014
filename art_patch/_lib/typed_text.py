"""Reads what a person typed: times and durations, one of some words, and the beginning of an id."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime

from art_patch._lib.visible_text import one_line
from art_patch.errors import ConfigError, NotFound

MOST_IDS = 6  # one more than are named where several begin alike

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}


def duration_s(text: str) -> float | None:
    """Return a duration such as `90d`, `12h`, `30min` or `45s` in seconds; `None` if the text is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.strip().lower())
    return float(found[1]) * _UNITS_S[found[2]] if found and found[2] in _UNITS_S else None


def moment(text: str, option: str, now: float) -> float:
    """Return a date, time or age such as `7d` in seconds since the epoch; a date without a zone is in local time."""
    if (age_s := duration_s(text)) is not None:
        return now - age_s
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    # A date may be valid and still lie beyond the range of the platform's clock.
    except (ValueError, OverflowError, OSError):
        raise ConfigError(
            f"{option} {text!r} is neither a date such as 2026-11-21 nor an age such as 7d or 12h"
        ) from None


def one_of(option: str, value: str, known: tuple[str, ...]) -> None:
    """Raise `ConfigError` unless the option's value is one of the known words."""
    if value not in known:
        raise ConfigError(f"{option} {value!r} is not one of {', '.join(known)}")


def the_one(prefix: str, ids: Sequence[str], kind: str, *, listed_by: str) -> str:
    """Return the id that a person means by its beginning, of those (`ids`) that begin so; the whole id is enough.

    `NotFound` if there is none, `ConfigError` if there are several.
    """
    if prefix in ids or len(ids) == 1:
        return prefix if prefix in ids else ids[0]
    shown = one_line(prefix)
    if not ids:
        raise NotFound(f"no {kind} has an id that begins with {shown!r}; `{listed_by}` has their ids")
    several = ", ".join(map(one_line, ids[: MOST_IDS - 1])) + (", ..." if len(ids) >= MOST_IDS else "")
    raise ConfigError(f"several ids begin with {shown!r}: {several}; say more of it")
