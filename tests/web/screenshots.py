"""Makes the screenshots of the documentation anew, from a project that is made for it.

::

    python -m tests.web.screenshots [--to docs/pages/how-to/web] [--only overview runs] [--whole]

Needs Debian's Chromium. Each page of the menu, and one page of each kind that they lead to, is taken once, wide and in
light colours; the overview also narrow and dark. `--whole` is for who wants to look at all of them: from top to bottom,
and each also narrow.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from art_patch.web import Given
from tests.support.chromium import chromium
from tests.support.web import Served, served
from tests.support.web_store import make_project

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).resolve().parents[2]
GIVEN = Given(arguments=["home", "project"], prices=lambda _: (2.5, 10.0), gpu_usd_per_hour=0.0)
HOME = "/home/ada/.local/share"  # stands for where this machine keeps the project

REPLACE = """([place, words]) => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll(place, words);
}"""


def paths_of(page: Page, server: Served) -> dict[str, str]:
    """Name of a picture -> path of its page."""
    found = {"overview": "/p/support-bot/"}
    for link in page.eval_on_selector_all("header nav a", "links => links.map(link => link.pathname)"):
        if link not in found.values():
            found[link.rstrip("/").rpartition("/")[2]] = link
    for path in list(found.values()):
        page.goto(server.url + path)
        for link in page.eval_on_selector_all("main a[href]", "links => links.map(link => link.pathname)"):
            kind = re.fullmatch(r"/p/support-bot/(\w+)/[^/]*\d[^/]*", link)
            if kind is not None:
                found.setdefault(f"one-{kind[1]}", link)
    page.goto(f"{server.url}/p/support-bot/groups?state=trained")
    for trained in page.eval_on_selector_all("main a[href*='/groups/']", "links => links.map(link => link.pathname)"):
        page.goto(server.url + trained)
        if page.locator("main mark").count():  # its siblings said different things
            break
    else:
        raise AssertionError("all siblings said the same")
    taught = page.eval_on_selector("main a[href*='/runs/']", "link => link.pathname")
    return found | {
        "one-groups": trained,
        "one-runs": taught,
        "tokens": f"{taught}?tokens=true#said",
        "money": "/p/support-bot/#shares",
    }


def main() -> None:
    """Take them."""
    parser = argparse.ArgumentParser(description="Screenshots of the pages.")
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "pages" / "how-to" / "web")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--whole", action="store_true")
    asked = parser.parse_args()
    asked.to.mkdir(parents=True, exist_ok=True)

    with tempfile.TemporaryDirectory() as place:
        settings = make_project(Path(place) / "art_patch", "support-bot", runs=400)
        with served(settings, given=GIVEN) as server, chromium() as browser:

            def take(page: Page, name: str, path: str) -> None:
                if asked.only and name.removesuffix("-phone") not in asked.only:
                    return
                page.goto(server.url + path)
                page.wait_for_load_state("load")
                page.wait_for_timeout(1_000)  # parts that are loaded after the page
                page.evaluate(REPLACE, [place, HOME])
                page.screenshot(path=asked.to / f"{name}.png", full_page=asked.whole)
                print(asked.to / f"{name}.png")

            context = browser.new_context(viewport={"width": 1_280, "height": 900}, color_scheme="light")
            page = context.new_page()
            page.goto(server.links["support-bot"])
            page.wait_for_url("**/p/support-bot/")
            paths = paths_of(page, server)
            state = context.storage_state()
            narrow = browser.new_context(
                viewport={"width": 360, "height": 740}, color_scheme="dark", storage_state=state
            ).new_page()
            for name, path in paths.items():
                take(page, name, path)
                if asked.whole or name == "overview":
                    take(narrow, f"{name}-phone", path)


if __name__ == "__main__":
    main()
