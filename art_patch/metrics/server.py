"""The monitor of `art-patch serve`: its requests, its engine, and what the store said when it was last read."""

from collections.abc import Mapping
from threading import Event
from typing import Any, Protocol

from art_patch import serving
from art_patch.metrics.catalogue import Page
from art_patch.metrics.requests import RequestMetrics
from art_patch.metrics.store_watch import StoreWatch


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

    def __init__(self, project: str, engine: Engine, watch: StoreWatch, stop: Event) -> None:
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
