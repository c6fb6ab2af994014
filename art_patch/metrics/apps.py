"""The metrics of an app process: of each one that has reported to the store, and of the proxy, which is one."""

from collections.abc import Mapping, Sequence
from typing import Any

from art_patch.metrics.catalogue import Page

_COUNTS = ("recorded", "dropped", "fallbacks", "engine_full", "shadowed")
_BREAKERS = ("engine", "challenger")


def add_app(page: Page, process: str, facts: Mapping[str, Any], *, at: float) -> None:
    """Add what a process said `at` some time; `facts` are the fields of `patching.Status`."""
    for name in _COUNTS:
        page.add(f"app_{name}", facts.get(name, 0), process=process)
    bypasses: Any = facts.get("bypasses")
    for bypass, count in sorted(bypasses.items()) if isinstance(bypasses, Mapping) else ():
        page.add("app_bypassed", count, process=process, bypass=bypass)
    page.add("app_queued", facts.get("queued"), process=process)
    opened: Any = facts.get("open_breakers")
    for breaker in _BREAKERS if isinstance(opened, Sequence) else ():  # an app of an earlier release does not say it
        page.add("app_breaker_open", breaker in opened, process=process, breaker=breaker)
    page.add("app_last_seen_timestamp_seconds", at, process=process)
