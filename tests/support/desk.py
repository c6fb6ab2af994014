"""A desk: a page of a real browser, the stores behind it, and what a person does there by mouse or by keyboard."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_patch.policies import base_fingerprint
from art_patch.settings import Settings, load_settings
from art_patch.store import Store, open_store
from art_patch.types import Policy
from tests.support.chromium import Watched, serious
from tests.support.engines import ADMIN_KEY
from tests.support.tiny import make_tiny_adapter
from tests.support.web import Served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext


class Desk(Watched):
    """A page of somebody who acts, by mouse or by keyboard, and the stores behind it."""

    def __init__(self, context: BrowserContext, server: Served, suite: Path) -> None:
        super().__init__(context, server.url)
        self.context, self.server, self.suite = context, server, suite

    def open(self, path: str) -> None:
        self.page.goto(f"{self.server.url}/p/{path}")

    def store(self, project: str = "bot") -> closing[Store]:
        return closing(open_store(self.server.settings[project].store_url, create=False, project=project))

    def tab(self, selector: str, text: str = "") -> None:
        """Press the key Tab until what is meant has the focus."""
        for _ in range(150):
            self.page.keyboard.press("Tab")
            if self.page.evaluate(
                "([selector, text]) => document.activeElement.matches(selector) && "
                "document.activeElement.textContent.includes(text)",
                [selector, text],
            ):
                return
        raise AssertionError(f"the key Tab does not reach {selector} {text}")

    def enter(self, selector: str, text: str = "") -> None:
        """Go there with Tab, and press Enter."""
        self.tab(selector, text)
        self.page.keyboard.press("Enter")

    def type(self, selector: str, words: str) -> None:
        """Go there with Tab, and type."""
        self.tab(selector)
        self.page.keyboard.press("Control+A")
        self.page.keyboard.type(words)

    def told(self, words: str) -> None:
        """The page that follows says so, is whole and readable, and its console is empty."""
        self.page.wait_for_selector("[role=status].said")
        assert words in self.page.locator("[role=status].said").first.inner_text()
        self.fine()
        assert not self.wrong

    def fine(self) -> None:
        self.page.wait_for_load_state("load")
        assert not serious(self.page)
        width: int = self.page.evaluate("document.documentElement.clientWidth")
        assert self.page.evaluate("document.documentElement.scrollWidth") <= width


def with_engine(home: Path, base: Path) -> Settings:
    """A project whose policies a real engine can serve."""
    settings = load_settings(home=home, project="model")
    settings.directory.mkdir(parents=True)
    key = settings.directory / "admin.key"
    key.write_text(ADMIN_KEY)
    key.chmod(0o600)
    sha256 = base_fingerprint(base)
    with closing(open_store(settings.store_url, project="model")) as store:
        store.ledger.add_base("agent@0", str(base), sha256, who="test")
        for step in range(1, 6):
            path = make_tiny_adapter(settings.adapters, base, "agent", step, seed=step)
            made = Policy(f"agent@{step}", str(base), sha256, "candidate", time.time(), str(path), "agent@0")
            store.ledger.add_candidate(made, trained_on=[], who="test")
    return settings


def entered(browser: Browser, server: Served) -> Any:
    """The cookie of somebody who has opened the links of both projects."""
    context = browser.new_context()
    page = context.new_page()
    for name in ("bot", "model"):
        page.goto(server.links[name])
        page.wait_for_url(f"**/p/{name}/")
    state = context.storage_state()
    context.close()
    return state
