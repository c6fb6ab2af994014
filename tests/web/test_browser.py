"""Every page in a real Chromium: wide and narrow, light and dark, by keyboard, without errors, and readable for all."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from art_patch.store import open_store
from tests.benchmarks.samples import small_run
from tests.support.chromium import SIZES, Watched, chromium, needs_chromium, serious
from tests.support.web import Served, served
from tests.support.web_store import make_project

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [needs_chromium, pytest.mark.slow]

EVIL = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">\u202e\"'`{{7*7}}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings = make_project(tmp_path_factory.mktemp("home"), said=EVIL, runs=120)
    with served(settings) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as launched:
        yield launched


@pytest.fixture(scope="module")
def state(server: Served, browser: Browser) -> Any:
    """The cookie of somebody who has opened the link."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(server.links["shop"])
    page.wait_for_url("**/p/shop/")
    assert "#" not in page.url
    kept = context.storage_state()
    context.close()
    return kept


def pages_of(page: Page, url: str) -> list[str]:
    """All pages that the menu names, and one page of each kind that they lead to."""
    page.goto(f"{url}/p/shop/")
    menu: list[str] = page.eval_on_selector_all("header nav a", "links => links.map(link => link.pathname)")
    deeper: dict[str, str] = {}
    for path in menu:
        page.goto(url + path)
        links: list[str] = page.eval_on_selector_all("main a[href]", "links => links.map(link => link.pathname)")
        for link in links:
            if link.startswith("/p/shop/"):
                deeper.setdefault(re.sub(r"[^/]+$", "*", link), link)
    return list(dict.fromkeys([*menu, *deeper.values()]))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_every_page_is_whole_and_readable(server: Served, browser: Browser, state: Any, size: str, scheme: Any):
    width, height = SIZES[size]
    context = browser.new_context(
        storage_state=state, viewport={"width": width, "height": height}, color_scheme=scheme, bypass_csp=True
    )
    watched = Watched(context, server.url)
    page, found = watched.page, list[str]()
    paths = pages_of(page, server.url)
    assert len(paths) >= 1
    for path in paths:
        page.goto(server.url + path)
        page.wait_for_load_state("load")
        assert page.title() != "taken", path
        assert "49" not in page.title(), path
        # Nothing is cut off at the side: what is wide scrolls in itself.
        assert page.evaluate("document.documentElement.scrollWidth") <= width, (path, size)
        found += [f"{path}: {each}" for each in serious(page)]
    context.close()
    assert not found, "\n".join(found)
    assert not watched.wrong


def test_the_policy_of_the_pages_allows_all_that_they_need(server: Served, browser: Browser, state: Any):
    """Under the content security policy as it is sent; a page that broke it would say so on the console."""
    context = browser.new_context(storage_state=state)
    watched = Watched(context, server.url)
    for path in pages_of(watched.page, server.url):
        watched.page.goto(server.url + path)
        watched.page.wait_for_selector("#live:has-text('Live')")
    context.close()
    assert not watched.wrong


def test_charts_tell_the_times_of_the_tables_in_whatever_zone_the_browser_is(
    server: Served, browser: Browser, state: Any
):
    context = browser.new_context(storage_state=state, timezone_id="America/New_York")
    page = context.new_page()
    page.goto(f"{server.url}/p/shop/")
    at = 1_764_000_000
    assert page.evaluate(f"moment({at}, 0)") == time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
    context.close()


def test_the_keyboard_alone_reaches_everything(server: Served, browser: Browser, state: Any):
    context = browser.new_context(storage_state=state)
    page = context.new_page()
    page.goto(f"{server.url}/p/shop/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    focusable = "a[href], button, input:not([type=hidden]), select, textarea, summary"
    count: int = page.evaluate(f"[...document.querySelectorAll('{focusable}')].filter(e => e.checkVisibility()).length")
    page.goto(f"{server.url}/p/shop/")
    reached = set[str]()
    for _ in range(count + 5):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("(() => (document.activeElement.dataset.n ||= String(Math.random())))()"))
        outline: str = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or page.evaluate("document.activeElement === document.body")
    assert len(reached) >= count
    context.close()


def test_an_open_page_shows_what_is_recorded_meanwhile(server: Served, browser: Browser, state: Any):
    context = browser.new_context(storage_state=state)
    page = context.new_page()
    page.goto(f"{server.url}/p/shop/")
    page.wait_for_selector("#live:has-text('Live')")
    before = page.locator("[data-fact=Calls]").inner_text()
    settings = server.settings["shop"]
    with closing(open_store(settings.store_url, project="shop")) as store:
        store.write(small_run(1, 10, began=time.time()))
    page.wait_for_function("before => document.querySelector('[data-fact=Calls]').textContent !== before", arg=before)
    context.close()


def test_an_event_that_comes_while_the_page_asks_is_not_lost(server: Served, browser: Browser, state: Any):
    context = browser.new_context(storage_state=state)
    page, asked = context.new_page(), list[str]()
    page.goto(f"{server.url}/p/shop/")
    page.wait_for_selector("#live:has-text('Live')")
    page.on("request", lambda request: asked.append(request.url))
    page.evaluate("tell('moves'); tell('moves'); tell('cycle')")
    page.wait_for_timeout(2_000)
    # Once for the first, and once more, since what was on its way may have been older.
    assert len([url for url in asked if url == f"{server.url}/p/shop/"]) >= 2
    context.close()


def test_a_page_that_nobody_looks_at_gives_its_connection_back(server: Served, browser: Browser, state: Any):
    """A browser has six connections to a server, for all of its tabs; a seventh page could not be loaded."""
    context = browser.new_context(storage_state=state)
    pages = [context.new_page() for _ in range(8)]
    for page in pages:
        page.goto(f"{server.url}/p/shop/")
        page.wait_for_selector("#live:has-text('Live')")
        # What a browser does with a tab that is behind another one; here all of them are in front.
        page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    pages[0].evaluate("delete document.hidden")
    pages[0].evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    pages[0].wait_for_selector("#live:has-text('Live')")
    context.close()


def test_back_shows_no_page_of_the_browsers_memory(server: Served, browser: Browser, state: Any):
    context = browser.new_context(storage_state=state)
    page = context.new_page()
    page.goto(f"{server.url}/p/shop/runs")
    page.evaluate("document.querySelector('h1').textContent = 'as it was'")
    with page.expect_navigation():
        page.evaluate("() => void dispatchEvent(new PageTransitionEvent('pageshow', {persisted: true}))")
    assert page.locator("h1").inner_text() == "Runs"
    context.close()


def test_the_kinds_of_events_are_the_same_on_both_sides():
    from art_patch.web.app import STATIC
    from art_patch.web.live import KINDS

    found = re.search(r"const KINDS = (\[.*?\]);", (STATIC / "page.js").read_text())
    assert found is not None
    assert tuple(json.loads(found[1])) == KINDS


def test_why_a_candidate_was_rejected_is_two_clicks_away(server: Served, browser: Browser, state: Any):
    context = browser.new_context(storage_state=state)
    page = context.new_page()
    page.goto(f"{server.url}/p/shop/")
    page.get_by_role("link", name="Policies").click()
    page.get_by_role("row", name="rejected").first.get_by_role("link").first.click()
    page.wait_for_selector("h2:has-text('Why it is rejected')")
    assert "not proven better" in page.locator("main").inner_text()
    context.close()


def test_a_decision_is_made_in_the_browser(server: Served, browser: Browser, state: Any):
    """A form without a script of ours, and what it did is told on the page that follows."""
    context = browser.new_context(storage_state=state)
    watched = Watched(context, server.url)
    page = watched.page
    page.goto(f"{server.url}/p/shop/decide?what=reject&policy=agent@6")
    page.locator("main input[name=who]").fill("Ada")
    page.locator("main [name=reason]").fill("too many complaints")
    page.locator("main form button").first.click()
    page.wait_for_url("**/p/shop/policies/agent**")
    assert "agent@6 is rejected for good" in page.locator("body").inner_text()
    assert not watched.wrong
    context.close()
    settings = server.settings["shop"]
    with closing(open_store(settings.store_url, project="shop")) as store:
        (move,) = store.ledger.history(limit=1, policy="agent@6")
    assert (move["to_state"], move["who"]) == ("rejected", "Ada (art-patch web: reject)")
    assert "too many complaints" in move["reason"]
