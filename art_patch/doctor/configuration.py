"""Checks of the settings: what is set, by whom, and which variables are no settings of ours."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from art_patch.doctor.finding import Finding
from art_patch.settings import PREFIX, Settings
from art_patch.store import without_password
from art_patch.types import Route

_SECRET = frozenset({"judge_api_key"})


def sources(settings: Settings, arguments: Collection[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return each setting as `{"value", "source"}`; the source is `argument`, `environment` or `default`."""
    variables = {name.upper() for name, value in environment.items() if value.strip()}
    found: dict[str, Any] = {}
    for name in Settings.model_fields:
        value = getattr(settings, name)
        if name in _SECRET and value is not None:
            value = "set, not shown"
        if name == "store" and value is not None:
            value = without_password(value)
        source = "default"
        if name in arguments:
            source = "argument"
        elif f"{PREFIX}{name}".upper() in variables:
            source = "environment"
        shown = value if value is None or isinstance(value, bool | int | float) else str(value)
        found[name] = {"value": shown, "source": source}
    return found


def chosen(found: Mapping[str, Any]) -> Finding:
    """Which settings are not left at their defaults."""
    parts = [
        f"{name}={one['value']} ({one['source']})" for name, one in sorted(found.items()) if one["source"] != "default"
    ]
    return Finding("settings", "ok", ", ".join(parts) or "all defaults")


def mistaken(wrong: str | None) -> Finding | None:
    """Variables that say something impossible: the app goes on without us, and without a word but one in its log."""
    if wrong is None:
        return None
    cure = "mend it, or unset it: until then `patch()` leaves the app alone, and what is below takes the default"
    return Finding("settings", "bad", wrong, cure)


def owner(settings: Settings, route: Route) -> Finding | None:
    """Whether the store is another project's; `None` if it is not, or nobody's."""
    if route.project in (None, settings.project):
        return None
    return Finding(
        "project",
        "bad",
        f"the store belongs to project {route.project!r}: apps of {settings.project!r} neither record nor route by it",
        f"say --project {route.project} (ART_PATCH_PROJECT={route.project}), or name a store of this project's own",
    )


def strangers(environment: Mapping[str, str]) -> list[Finding]:
    """`ART_PATCH_*` variables that nobody reads: most often a typing error that changes nothing, silently."""
    known = {f"{PREFIX}{name}".upper() for name in Settings.model_fields}
    found: list[Finding] = []
    for name in sorted(environment):
        if not name.upper().startswith(PREFIX) or name.upper() in known:
            continue
        near = difflib.get_close_matches(name.upper(), known, n=1)
        cure = f"did you mean {near[0]}?" if near else "take it out, or see art_patch/settings.py for what there is"
        found.append(Finding("settings", "warn", f"{name} is set and is no setting of this release", cure))
    return found
