"""Patching: the calls of an unchanged agent are sent to the champion and recorded in the store.

`patch()` wraps the OpenAI SDK, `wrap()` a single client of it; `unpatch()` restores the SDK. In: the calls of the app.
Out: the SDK's own results to the app, and an exchange for each call to `recording`.

Nothing in this package breaks, slows or blocks a call. If the champion fails, or its answer does not pass the checks,
the call goes upstream, and its record says why. Errors of the provider reach the caller unchanged. Faults of art_patch
are counted, and logged at most once a minute; under pytest they are raised.
"""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.patching.control import Handle, Status, flush, patch, patch_around, status, unpatch, wrap
    from art_patch.patching.routing.routed_call import pending_call
    from art_patch.patching.sdk.bypass import BYPASSES
    from art_patch.patching.sdk.wrapping import MODULE, Wrapping
else:
    __getattr__ = lazily()
