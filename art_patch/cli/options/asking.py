"""Asking before something is deleted, and durations as people write them."""

from __future__ import annotations

import re
import sys

from art_patch.errors import ConfigError

_UNITS_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}


def ask(question: str, *, yes: bool) -> bool:
    """Return whether to go on: `yes` was given, or whoever sits at the terminal says so.

    Raises:
        ConfigError: if nobody can be asked.
    """
    if yes:
        return True
    if not sys.stdin.isatty():
        raise ConfigError("this deletes data and nobody can be asked here; add --yes, or --dry-run to only look")
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def seconds(duration: str) -> float:
    """Return what `90d`, `12h`, `30min` or `45s` is in seconds.

    Raises:
        ConfigError: if it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", duration.strip().lower())
    if match is None or match[2] not in _UNITS_S:
        raise ConfigError(f"{duration!r} is no duration; write a number and s, min, h, d or w, like 90d")
    return float(match[1]) * _UNITS_S[match[2]]
