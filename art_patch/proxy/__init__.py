"""An HTTP server with the APIs of OpenAI and Anthropic. It routes and records calls as if `patch()` ran in the caller.

It is for calls that a patch of the Python SDK cannot reach. The caller gets the answer of upstream, or of the champion,
byte for byte. Calls go through a patched client of the OpenAI SDK, so mode, fallback, circuit breaker and record are
those of `patching`; all other requests are forwarded. Upstream gets the caller's key, headers (except `x-art-...`) and
body, only once. The caller's key is never recorded and never sent to the engine.
"""

from art_patch.proxy.server import PREFIX, SURFACES, run_proxy

__all__ = ["PREFIX", "SURFACES", "run_proxy"]
