"""Reads values from JSON that other programs wrote; a value of an unexpected type counts as missing."""

import json
import math
from typing import Any, cast

from pydantic_core import from_json

MAX_DEPTH = 200
"""Deepest nesting of JSON that is kept; Python's own parser and writer of JSON fail at about 1,000 levels."""


def as_object(value: Any) -> dict[str, Any]:
    """Return `value` if it is a JSON object, else an empty object."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """Return `value` if it is a JSON list, else an empty list."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def objects(value: Any) -> list[dict[str, Any]]:
    """Return the items of a JSON list that are objects; empty if `value` is not a list."""
    return [cast("dict[str, Any]", item) for item in as_list(value) if isinstance(item, dict)]


def as_text(value: Any) -> str:
    """Return `value` if it is a string, else an empty string."""
    return value if isinstance(value, str) else ""


def as_number(value: Any) -> float | None:
    """Return `value` as a float if it is a finite number, else `None`."""
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # a whole number with hundreds of digits
        return None
    return number if math.isfinite(number) else None


def as_ids(value: Any) -> tuple[int, ...] | None:
    """Return a JSON list of token ids (32-bit numbers) as a tuple; `None` if `value` is anything else."""
    if not isinstance(value, list):
        return None
    # One wrong item makes all ids useless: they would no longer line up with the log-probabilities.
    whole = all(isinstance(item, int) and 0 <= item < 1 << 32 for item in cast("list[Any]", value))
    return tuple(cast("list[int]", value)) if whole else None


def as_count(value: Any) -> int | None:
    """Return `value` if it is a whole number from 0 to the largest that a database column holds, else `None`."""
    return value if isinstance(value, int) and 0 <= value < 1 << 63 else None


def shallow(value: Any, most: int = MAX_DEPTH) -> Any:
    """Return `value` with what is nested deeper than `most` replaced by `"..."`, for code that is recursive."""
    if not isinstance(value, dict | list | tuple):
        return value
    if most <= 0:
        return "..."
    if isinstance(value, dict):
        return {key: shallow(each, most - 1) for key, each in cast("dict[str, Any]", value).items()}
    return [shallow(each, most - 1) for each in cast("list[Any]", value)]


def parse_object(raw: bytes | str) -> dict[str, Any]:
    """Parse JSON text and return its object, cut off below `MAX_DEPTH`; empty if it is invalid or not an object."""
    try:
        # Takes a third of the time of `json.loads`, but refuses some input that `json.loads` accepts.
        found = as_object(from_json(raw))
    except ValueError:
        try:
            found = as_object(json.loads(raw))
        except (ValueError, RecursionError):
            return {}
    # Counting brackets is much cheaper than walking through the object, and nearly always enough.
    openers = raw.count(b"[") + raw.count(b"{") if isinstance(raw, bytes) else raw.count("[") + raw.count("{")
    if openers > MAX_DEPTH:
        _cut(found)
    return found


def _cut(root: dict[str, Any]) -> None:
    """Replace everything nested deeper than `MAX_DEPTH` by `"..."`."""
    # A loop and not recursion. Hashing and writing are recursive; they must not fail on input that was just parsed.
    level: list[Any] = [root]
    for depth in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for holder in level:
            entries: Any = holder.items() if isinstance(holder, dict) else enumerate(cast("list[Any]", holder))
            for key, value in entries:
                if not isinstance(value, dict | list):
                    continue
                if depth == MAX_DEPTH:
                    holder[key] = "..."
                else:
                    below.append(value)
        level = below
