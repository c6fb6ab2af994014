"""A real Chromium, driven by playwright: Debian's (`apt-get install chromium`), not one that playwright downloads."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="there is no chromium; run: apt-get install chromium")

SIZES = {"desktop": (1_280, 900), "phone": (360, 740)}

# A browser that starts asks its maker for news; here nothing answers.
_QUIET = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-extensions",
)  # fmt: skip


@contextmanager
def chromium() -> Generator[Browser]:
    """Run a browser while the block runs."""
    from playwright.sync_api import sync_playwright

    assert PROGRAM is not None, "there is no chromium; run: apt-get install chromium"
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=PROGRAM, args=list(_QUIET))
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page of the browser, and all that went wrong on it."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.page: Page = context.new_page()
        self.wrong: list[str] = []
        self.page.on(
            "console", lambda said: self.wrong.append(said.text) if said.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda asked: None if asked.url.startswith(url) else self.wrong.append(asked.url))
        self.page.on(
            "response", lambda got: self.wrong.append(f"{got.status} {got.url}") if got.status >= 400 else None
        )


def serious(page: Page) -> list[str]:
    """What axe finds on a page that keeps somebody from using it."""
    from axe_playwright_python.sync_playwright import Axe

    for wait_ms in (0, 1_000):  # a part that is exchanged just now is whole in a moment
        page.wait_for_timeout(wait_ms)
        its = [each for each in Axe().run(page).response["violations"] if each["impact"] in ("serious", "critical")]
        if not its:
            return []
    return [f"{each['id']}: {each['nodes'][0]['html'][:200]}" for each in its]
