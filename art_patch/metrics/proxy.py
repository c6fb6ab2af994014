"""The monitor of `art-patch proxy`: its requests, and what it says as an app process; nothing of the store."""

import os
import socket
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from art_patch.metrics.apps import add_app
from art_patch.metrics.catalogue import Page
from art_patch.metrics.requests import RequestMetrics


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
