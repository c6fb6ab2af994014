"""Metrics for Prometheus, made with its own client: what the store says, and what a server's own process counts.

`catalogue` names every metric. `from_store` reads the store, for the textfile of `art-patch status`, and for the server
in a background thread (`store_watch`). `requests` counts requests and renders the page of `GET /metrics`.
"""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.metrics.catalogue import CATALOGUE
    from art_patch.metrics.from_store import gather
    from art_patch.metrics.proxy import ProxyMetrics
    from art_patch.metrics.server import ServerMetrics
    from art_patch.metrics.store_watch import StoreWatch
else:
    __getattr__ = lazily()
