"""Metrics for Prometheus, made with its own client: what the store says, and what a server's own process counts.

`catalogue` names every metric. `from_store` reads the store, for the textfile of `art-patch status`, and for the server
in a background thread. `servers` counts the requests of a server or proxy and renders the page of `GET /metrics`.
"""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.metrics.catalogue import CATALOGUE
    from art_patch.metrics.from_store import StoreWatch, gather
    from art_patch.metrics.servers import ProxyMetrics, ServerMetrics
else:
    __getattr__ = lazily()
