"""The monitors of `art-patch serve` and `art-patch proxy`: each counts and times the requests of its process.

A monitor's `observe` is called on the event loop after each request, and costs microseconds. `text`, the page of
`GET /metrics`, may run in any thread, and needs numbers in memory alone: the server's `StoreWatch` reads the store.
"""

import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from threading import Event
from typing import Any, Protocol

import prometheus_client as prometheus
from prometheus_client.registry import Collector

from art_patch import serving
from art_patch._lib.lazy import TYPE_CHECKING
from art_patch.metrics.catalogue import CATALOGUE, Family, Page, add_app

if TYPE_CHECKING:  # the proxy's process does without the modules that read the store
    from art_patch.metrics.from_store import StoreWatch

_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120)
_CODES = range(100, 600)


class RequestMetrics(Collector):
    """Requests by a label and by HTTP status, and how long they took; a page that `make` adds for each scrape."""

    def __init__(self, server: str, label: str, project: str, make: Callable[[], Page]) -> None:
        prometheus.disable_created_metrics()  # a series for each counter that says since when it counts
        self._registry = prometheus.CollectorRegistry(auto_describe=False)
        counter, histogram = CATALOGUE[f"{server}_requests"], CATALOGUE[f"{server}_request_duration_seconds"]
        names = ("project", label)
        self._requests = prometheus.Counter(counter.full, counter.help, (*names, "code"), registry=self._registry)
        self._seconds = prometheus.Histogram(
            histogram.full, histogram.help, names, registry=self._registry, buckets=_BUCKETS_S
        )
        self._project, self._make = project, make
        self._registry.register(self)
        prometheus.ProcessCollector(registry=self._registry)
        # Looked up once for each pair: that takes longer than to count.
        self._known: dict[tuple[str, int], tuple[prometheus.Counter, prometheus.Histogram]] = {}

    def collect(self) -> Iterator[Family]:
        """Yield the samples of a new page, for Prometheus' client."""
        return self._make().collect()

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
        return prometheus.generate_latest(self._registry)


class Engine(Protocol):
    """The parts of an engine in this process that its metrics need."""

    @property
    def healthy(self) -> bool:
        """Whether it answers requests."""
        ...

    def policies(self) -> list[str]:
        """Return the names of the policies that it has loaded."""
        ...

    def stats(self) -> Mapping[str, int]:
        """Return how many requests it answers, and what else it counts."""
        ...


class ServerMetrics:
    """The monitor of `art-patch serve`."""

    def __init__(self, project: str, engine: Engine, watch: "StoreWatch", stop: Event) -> None:
        """Count the requests to `engine`; `stop` is set when the server begins to end."""
        self._engine, self._watch, self._stop, self._project = engine, watch, stop, project
        self._metrics = RequestMetrics("server", "policy", project, self._now)

    def observe(self, scope: Mapping[str, Any], code: int, took_s: float) -> None:
        """Count a chat completion; other requests are not counted."""
        if scope["path"].endswith("/chat/completions"):
            policy = scope.get(serving.POLICY, "")
            # A caller may name anything; only what is served becomes a label.
            self._metrics.count(policy if policy in self._engine.policies() else "", code, took_s)

    def why_not_ready(self) -> str | None:
        """Return why this server cannot answer the apps' calls, without any name; `None` if it can."""
        if self._stop.is_set():
            return "the server stops"
        if not self._engine.healthy:
            return "the engine does not answer"
        route = self._watch.route
        asked = route and (route.champion or route.challenger or route.learner)
        if asked and asked not in self._engine.policies():
            return "the policy that must serve is not loaded here"
        return None

    def text(self) -> bytes:
        """Return the page for Prometheus."""
        return self._metrics.page() + self._watch.text

    def _now(self) -> Page:
        page, stats = Page(self._project), self._engine.stats()
        self._watch.describe(page)
        page.add("server_ready", self.why_not_ready() is None)
        for policy in self._engine.policies():
            page.add("server_policy_loaded", 1, policy=policy)
        page.add("server_running", stats["running"])
        page.add("server_waiting", stats.get("waiting"))
        for state in ("ready", "starting"):
            page.add("server_replicas", stats.get(state), state=state)
        page.add("server_replica_restarts", stats.get("restarts"))
        return page


class ProxyMetrics:
    """The monitor of `art-patch proxy`."""

    def __init__(self, project: str, paths: Collection[str], status: Callable[[], Any]) -> None:
        """Count requests to `paths` by their path, and others below `/v1` together; `status` is that of the patch."""
        self._project, self._paths, self._status = project, paths, status
        self._metrics = RequestMetrics("proxy", "path", project, self._now)
        self._process = f"{socket.gethostname()}:{os.getpid()}"  # as it reports to the store

    def observe(self, scope: Mapping[str, Any], code: int, took_s: float) -> None:
        """Count a request that the proxy answered or passed on."""
        path: str = scope["path"]
        if path.startswith("/v1/"):
            self._metrics.count(path if path in self._paths else "other", code, took_s)

    def why_not_ready(self) -> str | None:
        """Return why calls are neither recorded nor routed; `None` if they are, be it that upstream answers them all.

        A proxy that forwards to upstream is of use, so the engine and the store do not matter here.
        """
        return None if self._status().patched else "the proxy begins, or ends"

    def text(self) -> bytes:
        """Return the page for Prometheus."""
        return self._metrics.page()

    def _now(self) -> Page:
        page = Page(self._project)
        add_app(page, self._process, self._status()._asdict(), at=time.time())
        return page
