"""Taking values out of JSON that somebody else wrote: what is not of the expected shape reads as absent."""

from __future__ import annotations

import json
from typing import Any, cast


def as_object(value: Any) -> dict[str, Any]:
    """Return an object; empty if it is none."""
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """Return a list; empty if it is none."""
    return cast(list[Any], value) if isinstance(value, list) else []


def objects(value: Any) -> list[dict[str, Any]]:
    """Return the objects of a list, without what else is in it."""
    return [cast(dict[str, Any], item) for item in as_list(value) if isinstance(item, dict)]


def as_text(value: Any) -> str:
    """Return a string; empty if it is none."""
    return value if isinstance(value, str) else ""


def as_ids(value: Any) -> tuple[int, ...] | None:
    """Return token ids; `None` if they are none."""
    if not isinstance(value, list) or not all(isinstance(item, int) for item in cast(list[Any], value)):
        return None
    return tuple(cast(list[int], value))


def as_count(value: Any) -> int | None:
    """Return a number of things; `None` if it is none."""
    return value if isinstance(value, int) and value >= 0 else None


def parse_object(raw: bytes | str) -> dict[str, Any]:
    """Return the object that `raw` spells; empty if it spells none."""
    try:
        return as_object(json.loads(raw))
    except (ValueError, RecursionError):
        return {}
