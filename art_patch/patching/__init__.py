"""Patching: an unchanged agent's calls go to the champion and into the store.

`patch()` wraps the OpenAI SDK, `wrap()` one client of it; `unpatch()` restores it. In: the calls of the app. Out: the
SDK's own results to the app, an exchange for each call to `recording`.

Rules: nothing here breaks, slows or blocks a call. The champion's answer is checked before it is handed out; if it
fails, the call goes upstream as if we were not there, and one record says why. Provider errors reach the caller as
they are. Our own faults are counted and logged at most once a minute; under pytest they are raised.
"""

from __future__ import annotations

from art_patch.patching.control import Handle, Status, flush, patch, status, unpatch, wrap

__all__ = ["Handle", "Status", "flush", "patch", "status", "unpatch", "wrap"]
