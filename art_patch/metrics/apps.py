"""The metrics of an app process: of each one that has reported to the store, and of the proxy, which is one."""

from collections.abc import Mapping
from typing import Any

from art_patch.metrics.catalogue import Page

_COUNTS = ("recorded", "dropped", "fallbacks", "engine_full", "shadowed")
_BREAKERS = ("engine", "challenger")


def add_app(page: Page, process: str, facts: Mapping[str, Any], *, at: float) -> None:
    """Add what a process said `at` some time; `facts` are the fields of `patching.Status`."""
    for name in _COUNTS:
        page.add(f"app_{name}", facts.get(name, 0), process=process)
    for bypass, count in sorted(facts.get("bypasses", {}).items()):
        page.add("app_bypassed", count, process=process, bypass=bypass)
    if "queued" in facts:  # an app of an earlier release does not say it
        page.add("app_queued", facts["queued"], process=process)
        for breaker in _BREAKERS:
            page.add("app_breaker_open", breaker in facts["open_breakers"], process=process, breaker=breaker)
    page.add("app_last_seen_timestamp_seconds", at, process=process)
