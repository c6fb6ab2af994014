"""Proxy: an OpenAI-compatible address whose calls are routed and recorded as if `patch()` were in the caller.

For what no patch of the OpenAI SDK can see: other languages, litellm's own transports, other HTTP clients. In: HTTP
requests under `/v1`. Out: upstream's answers, or the champion's, to the byte.

Rules. Chat completions, completions and responses go through a client of the OpenAI SDK in this process, which is
patched: the mode, the fallback, the breaker and the record are `patching`'s own. Everything else passes through.
Upstream is sent what the caller sent: its key, its headers, its body, once; retries are the caller's own. Upstream's
answers, errors included, come back as they are. The caller's key is never recorded and never sent to the engine. A
caller that goes away ends its call upstream.
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
