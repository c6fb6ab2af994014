"""An HTTP address with OpenAI's API, whose calls are routed and recorded as if `patch()` ran in the caller.

It is for calls that no patch of the SDK can see: other languages, litellm's own transports, other HTTP clients. In:
HTTP requests under `/v1`. Out: the answers of upstream, or of the champion, byte for byte.

Chat completions, completions and responses go through a patched client of the OpenAI SDK in this process, so mode,
fallback, circuit breaker and record are those of `patching`. All other requests pass through. Upstream gets what the
caller sent (its key, headers and body), once; retries are the caller's own. The caller's key is never recorded and
never sent to the engine. A caller that disconnects ends its call upstream.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
    from art_patch.proxy.server import run_proxy
else:
    __getattr__ = lazily(
        __name__,
        {
            "server": "run_proxy",
        },
    )
