"""Makes the screenshots of the documentation anew, from a project that is made for it.

::

    python -m tests.web.screenshots [--to docs/pages/how-to/web] [--only overview runs]

Needs Debian's Chromium. Each page of the menu, and one page of each kind that they lead to, is taken once, wide and in
light colours; the overview also narrow and dark.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

from tests.support.chromium import chromium
from tests.support.web import served
from tests.support.web_store import make_project

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Take them."""
    parser = argparse.ArgumentParser(description="Screenshots of the pages.")
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "pages" / "how-to" / "web")
    parser.add_argument("--only", nargs="*", default=[])
    asked = parser.parse_args()
    asked.to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        home = Path(place) / "art_patch"
        settings = make_project(home, "support-bot", runs=400)
        with served(settings) as server, chromium() as browser:
            context = browser.new_context(viewport={"width": 1_280, "height": 900}, color_scheme="light")
            page = context.new_page()
            page.goto(server.links["support-bot"])
            page.wait_for_url("**/p/support-bot/")
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
            for name, path in found.items():
                if asked.only and name not in asked.only:
                    continue
                page.goto(server.url + path)
                page.wait_for_load_state("load")
                page.wait_for_timeout(800)  # parts that are loaded after the page
                page.screenshot(path=asked.to / f"{name}.png", full_page=False)
                print(asked.to / f"{name}.png")
            if not asked.only or "overview" in asked.only:
                narrow = browser.new_context(
                    viewport={"width": 360, "height": 740}, color_scheme="dark", storage_state=context.storage_state()
                ).new_page()
                narrow.goto(f"{server.url}/p/support-bot/")
                narrow.wait_for_timeout(800)
                narrow.screenshot(path=asked.to / "overview-phone.png")


if __name__ == "__main__":
    main()
