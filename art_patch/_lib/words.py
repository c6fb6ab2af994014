"""Words that people read and type: safe to print, numbers said in words, and what a person means by an option's text.

Recorded text may hold escape sequences, which could hide text or type for the user, and marks that change the direction
of writing. `visible` and `one_line` show them as escapes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime

from art_patch.errors import ConfigError, NotFound

# C0 without tab and newline, DEL, C1, marks and overrides of direction, line separators, halves of surrogate pairs.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def visible(text: object) -> str:
    r"""Return the text with each character that could control a terminal replaced by its escape, such as `\x1b`."""
    # A Windows line end is harmless; a carriage return alone could overwrite the line.
    return _UNSAFE.sub(_escape, str(text).replace("\r\n", "\n"))


def one_line(text: object) -> str:
    """Return the text as `visible` does, with line breaks and tabs replaced, so that it fits on one line."""
    return " ".join(visible(text).split())


def sentences(reason: object) -> list[str]:
    """Return the parts of a reason, a line each, the verdict first: it joins them with `; ` outside of brackets."""
    parts, depth = [""], 0
    for part in one_line(reason).split("; "):
        parts[-1] = f"{parts[-1]}; {part}" if depth > 0 else part
        depth += part.count("(") - part.count(")")
        if depth <= 0:
            parts.append("")
            depth = 0
    return [part for part in parts if part]


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


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


def ago(seconds: float) -> str:
    """Return a duration in the largest unit that fits: `42 s`, `3 min`, `5 h`, `2 d`."""
    for limit, unit, size in ((120, "s", 1), (7_200, "min", 60), (172_800, "h", 3_600)):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def seconds(value: float) -> str:
    """Return a duration in words: `40 ms`, `1.3 s`, `2 min`."""
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.0f} min"


def size(count: int) -> str:
    """Return a size in units of 1024, as file systems have it: `12.3 MiB`."""
    for unit, limit in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return f"{count} B"


def share(value: float | None) -> str:
    """Return a share of 0 to 1 as a percentage, or `-` if it is `None`."""
    return "-" if value is None else f"{value:.1%}"


def usd(value: float | None) -> str:
    """Return an amount in US dollars, `unknown` if it is `None`: `$1,234.50`, `-$0.30`."""
    if value is None:
        return "unknown"
    # -0.004 is shown as $0.00, without a sign.
    return f"-${-value:,.2f}" if round(value, 2) < 0 else f"${abs(value):,.2f}"


def counted(number: int, one: str, many: str) -> str:
    """Return the number with the right noun, singular or plural: `1 call`, `2 calls`."""
    return f"{number} {one if number == 1 else many}"


def listed(parts: Sequence[str], otherwise: str) -> str:
    """Return the parts joined with commas, or the text `otherwise` if there are no parts."""
    return ", ".join(parts) or otherwise
