"""Patching: an unchanged agent's calls go to the champion and into the store.

`patch()` wraps the OpenAI SDK, `wrap()` one client of it; `unpatch()` restores it. In: the calls of the app. Out: the
SDK's own results to the app, an exchange for each call to `recording`.

Rules: nothing here breaks, slows or blocks a call. The champion's answer is checked before it is handed out; if it
fails, the call goes upstream as if we were not there, and one record says why. Provider errors reach the caller as
they are. Our own faults are counted and logged at most once a minute; under pytest they are raised.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
    from art_patch.patching.control import Handle, Status, flush, patch, patch_around, status, unpatch, wrap
    from art_patch.patching.sdk.bypasses import BYPASSES
    from art_patch.patching.sdk.wrapping import MODULE, Wrapping
else:
    __getattr__ = lazily(
        __name__,
        {
            "control": "Handle Status flush patch patch_around status unpatch wrap",
            "sdk.bypasses": "BYPASSES",
            "sdk.wrapping": "MODULE Wrapping",
        },
    )
