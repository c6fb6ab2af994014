"""Counts and times the requests of a server in its process, and renders the page of `GET /metrics`.

`count` is called on the event loop after each request, and costs microseconds. `page` may run in any thread, and needs
numbers in memory alone.
"""

from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from art_patch.metrics.catalogue import CATALOGUE, Page, Pages

_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120)
_CODES = range(100, 600)


class RequestMetrics:
    """Requests by a label and by HTTP status, and how long they took; a page that `make` adds for each scrape."""

    def __init__(self, server: str, label: str, project: str, make: Callable[[], Page]) -> None:
        disable_created_metrics()  # a series for each counter that says since when it counts
        self._registry = CollectorRegistry(auto_describe=False)
        counter, histogram = CATALOGUE[f"{server}_requests"], CATALOGUE[f"{server}_request_duration_seconds"]
        names = ("project", label)
        self._requests = Counter(counter.full, counter.help, (*names, "code"), registry=self._registry)
        self._seconds = Histogram(histogram.full, histogram.help, names, registry=self._registry, buckets=_BUCKETS_S)
        self._project = project
        self._registry.register(Pages(make))
        ProcessCollector(registry=self._registry)
        # Looked up once for each pair: that takes longer than to count.
        self._known: dict[tuple[str, int], tuple[Counter, Histogram]] = {}

    def count(self, value: str, code: int, took_s: float) -> None:
        """Count a request with this value of the label."""
        # A caller who leaves before the answer gets none; nginx' word for it.
        key = (value, code if code in _CODES else 499)
        if (found := self._known.get(key)) is None:
            found = (
                self._requests.labels(self._project, value, str(key[1])),
                self._seconds.labels(self._project, value),
            )
            self._known[key] = found
        found[0].inc()
        found[1].observe(took_s)

    def page(self) -> bytes:
        """Return what this process knows, in Prometheus' text format."""
        return generate_latest(self._registry)
