"""The server of `art-patch web` in a thread, over real stores, and browsers' requests to it by httpx."""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx

from art_patch.settings import Settings
from art_patch.web import KEY_FILE, run_web


class Served:
    """A server that runs."""

    def __init__(self, url: str, links: dict[str, str], settings: dict[str, Settings]) -> None:
        self.url, self.links, self.settings = url, links, settings

    def client(self, *, headers: Mapping[str, str] | None = None, **how: Any) -> httpx.Client:
        """A client that has entered nothing yet; it names its origin, as a browser does with each change."""
        return httpx.Client(base_url=self.url, headers={"origin": self.url, **(headers or {})}, timeout=30, **how)

    @contextmanager
    def entered(self, project: str | None = None) -> Generator[httpx.Client]:
        """A client that has spent the link of a project, or of the only one."""
        token = urlsplit(self.links.pop(project or next(iter(self.links)))).fragment
        with self.client(follow_redirects=True) as client:
            assert client.post("/enter", data={"token": token}).status_code == 200
            yield client

    def key(self, project: str) -> str:
        """The key with which programs may look."""
        return (self.settings[project].directory / KEY_FILE).read_text().strip()


def csrf_of(page: httpx.Response) -> str:
    """The token that the forms of a page send along."""
    _, found, rest = page.text.partition('name="csrf" value="')
    assert found, page.text[:500]
    return rest.partition('"')[0]


@contextmanager
def served(
    *settings: Settings, role: Any = "act", port: int = 0, host: str = "127.0.0.1", **how: Any
) -> Generator[Served]:
    """Run a server over these projects' stores, which exist, while the block runs."""
    stop, ready, found, failed = threading.Event(), threading.Event(), dict[str, Any](), list[BaseException]()

    def on_ready(here: str, links: dict[str, str]) -> None:
        found.update(url=here, links=links)
        ready.set()

    def run() -> None:
        try:
            run_web(settings, host=host, port=port, role=role, on_ready=on_ready, stop=stop, **how)
        except BaseException as error:
            failed.append(error)
            ready.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        if failed:
            raise failed[0]
        yield Served(found["url"], found["links"], {each.project: each for each in settings})
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()
