"""A real Chromium, driven by playwright: Debian's (`apt-get install chromium`), not one that playwright downloads."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="there is no chromium; run: apt-get install chromium")

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
