"""Whether an engine is there at all, asked in the background while callers wait for it, so that no others join them.

A call that is not streamed shows no first token, so only its long timeout ends it, and a hanging engine would collect
callers for that long. Therefore the recorder's thread asks `/health` when a caller has waited for longer than a first
token may take. No answer opens the circuit breaker at once; an engine that is back is tried at once.
"""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

TIMEOUT_S = 1.0


def is_alive(base_url: str) -> bool:
    """Whether the engine answers; any answer but a 5xx will do, because not every engine knows `/health`."""
    address = urlsplit(base_url)
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    connection = kind(address.netloc.rpartition("@")[2], timeout=TIMEOUT_S)
    try:
        connection.request("GET", f"{address.path.rstrip('/').removesuffix('/v1')}/health")
        return connection.getresponse().status < 500
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
