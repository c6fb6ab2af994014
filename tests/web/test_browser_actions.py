"""Every action in a real Chromium, most of them by keyboard alone: what it says, what the store has, and for whom.

An action is a row of `ACTIONS`, a decision about a policy, or a link. Each is done on a wide and light or a narrow and
dark page, and the page that follows is examined.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from pathlib import Path
from threading import Thread
from typing import Any, get_args

import pytest

from art_patch.gate import read_suite
from art_patch.pipeline import last_retrain
from art_patch.serving import EmbeddedEngine
from art_patch.store import open_store
from art_patch.web.actions import ACTIONS
from art_patch.web.policies import What
from tests.support.chromium import SIZES, chromium, needs_chromium
from tests.support.desk import Desk, entered, with_engine
from tests.support.engines import serve
from tests.support.grouped import grouped
from tests.support.web import served

pytestmark = [needs_chromium, pytest.mark.slow]

_REFUSED = "Failed to load resource"  # how the console tells of a page with an error status

BY: dict[str, Callable[[Desk], None]] = {}
"""How each action is done, by its path; of decisions, with what is decided."""


def does(action: str) -> Callable[[Callable[[Desk], None]], Callable[[Desk], None]]:
    def keep(how: Callable[[Desk], None]) -> Callable[[Desk], None]:
        BY[action] = how
        return how

    return keep


# --- runs ---


@does("score-run/{id:any}")
def by_keyboard_a_run_is_scored(desk: Desk) -> None:
    desk.open("bot/runs/a")
    desk.enter("summary", "Score it")
    desk.type("form[action$='score-run/a'] input[name=who]", "Ada")
    desk.enter("button", "Good")
    desk.told("scored: thumbs 1")
    with desk.store() as store:
        (run,) = store.read.trajectories(["a"])
    assert [(one.name, one.value, one.judge) for one in run.scores if one.source == "user"] == [("thumbs", 1.0, "Ada")]


@does("correct-run/{id:any}")
def by_keyboard_an_answer_is_corrected(desk: Desk) -> None:
    desk.open("bot/runs/b")
    desk.enter("#call-2 summary", "Correct this answer")
    desk.type("#call-2 textarea", "They cost 12, of course.")
    desk.type("#call-2 input[name=who]", "Ada")
    desk.enter("#call-2 button", "Keep the correction")
    desk.told("the correction is kept")
    with desk.store() as store:
        (kept,) = store.evidence.corrections(["b"])["b"]
    assert (kept.message["content"], kept.call_id, kept.comment) == ("They cost 12, of course.", "b-2", "by Ada")


@does("run-test/{id:any}")
def a_run_becomes_a_test(desk: Desk) -> None:
    desk.open("bot/runs/c")
    desk.page.locator("#call-2").get_by_role("link", name="Make it a test of the suite").click()
    desk.page.get_by_label("Name of the test").fill("loaves")
    desk.page.get_by_label("Your name").fill("Ada")
    desk.page.get_by_role("button", name="Append it to the suite").click()
    desk.told("added loaves to")
    assert [turn.scenario_key for turn in read_suite(desk.suite)] == ["suite:first", "suite:loaves"]


@does("erase-run/{id:any}")
def by_keyboard_a_run_is_erased(desk: Desk) -> None:
    desk.open("bot/runs/i")
    desk.enter("main a", "Erase this run")
    desk.page.wait_for_url("**/erase-run/i")
    desk.type("main input[name=who]", "Ada")
    desk.enter("main button", "Erase the run")
    desk.told("erased trajectory i")
    with desk.store() as store:
        assert store.read.known(["h", "i"]) == {"h"}


# --- review ---


@does("review/prefer")
def by_keyboard_one_of_two_is_preferred(desk: Desk) -> None:
    desk.open("bot/review")
    desk.type("#who", "Ada")
    desk.tab("button[name=choice]")
    desk.page.keyboard.press("1")
    desk.told("Noted.")
    with desk.store() as store:
        runs = store.read.trajectories([*"abcde"])
    kept = sorted(one.value for run in runs for one in run.scores if one.name == "feedback")
    assert kept == [0.0, 1.0]


@does("review/thumb")
def a_run_gets_a_thumb(desk: Desk) -> None:
    desk.open("bot/review?group=g1")
    desk.page.get_by_text("Say more of the left one").click()
    form = desk.page.locator("form[action$='review/thumb']").first
    run = form.locator("input[name=run]").input_value()
    form.get_by_label("Your name").fill("Ada")
    form.get_by_role("button", name="Bad").click()
    desk.told("Noted: thumbs down.")
    with desk.store() as store:
        (found,) = store.read.trajectories([run])
    assert [one.value for one in found.scores if one.name == "thumbs" and one.judge is None] == [0.0]


@does("review/correct")
def by_keyboard_a_right_answer_is_kept(desk: Desk) -> None:
    desk.open("bot/review?group=g2")
    desk.enter("summary", "Say more of the right one")
    run = desk.page.locator("form[action$='review/correct'] input[name=run]").last.input_value()
    desk.type("#answer-right", "Twelve.")
    desk.type("#who-correct-right", "Ada")
    desk.enter("button", "Keep as the right answer")
    desk.told("Noted: the next update may learn this answer.")
    with desk.store() as store:
        assert [one.message["content"] for one in store.evidence.corrections([run])[run]] == ["Twelve."]


# --- cycles and policies ---


@does("cycles/start")
def by_keyboard_a_cycle_is_started(desk: Desk) -> None:
    desk.open("bot/cycles")
    desk.enter("main a", "Start a cycle")
    desk.page.wait_for_url("**/cycles/start")
    desk.type("main input[name=who]", "Ada")
    desk.enter("main button", "Start the cycle")
    desk.told("a cycle was started as process")
    until = time.monotonic() + 60
    while last_retrain(desk.server.settings["bot"].directory) is None:
        assert time.monotonic() < until
        time.sleep(0.1)


def decided(desk: Desk, policy: str, to_state: str, words: str) -> None:
    desk.told(words)
    with desk.store("model") as store:
        (move,) = store.ledger.history(limit=1, policy=policy)
        if (tested := store.ledger.challenger()) is not None and to_state != "champion":
            store.ledger.end_test(tested.name, who="test", reason="for the next one")
    assert (move["to_state"], move["who"].partition(" ")[0]) == (to_state, "Ada")


def opened_policy(desk: Desk, name: str, button: str) -> None:
    desk.open("model/policies")
    desk.page.get_by_role("link", name=name).first.click()
    desk.page.get_by_role("link", name=button, exact=True).click()


@does("decide: shadow")
def a_policy_is_tested_as_a_shadow(desk: Desk) -> None:
    opened_policy(desk, "agent@1", "Test as a shadow")
    desk.page.get_by_label("Your name").fill("Ada")
    desk.page.get_by_role("button", name="Test it as a shadow").click()
    decided(desk, "agent@1", "shadow", "agent@1")


@does("decide: canary")
def by_keyboard_a_policy_becomes_a_canary(desk: Desk) -> None:
    desk.open("model/policies/agent@2")
    desk.enter("main a", "Test as a canary")
    desk.page.wait_for_url("**/decide?**")
    desk.type("input[name=percent]:not([type=hidden])", "25")
    desk.page.keyboard.press("Enter")
    desk.page.wait_for_url("**percent=25**")
    desk.type("textarea[name=reason]", "as agreed")
    desk.type("main input[name=who]", "Ada")
    desk.enter("main button", "Test it on 25 %")
    with desk.store("model") as store:
        desk.page.wait_for_selector("[role=status].said")
        assert (store.ledger.route().challenger, store.ledger.route().challenger_percent) == ("agent@2", 25.0)
    decided(desk, "agent@2", "canary", "25 %")


@does("decide: promote")
def a_policy_is_promoted(desk: Desk) -> None:
    opened_policy(desk, "agent@3", "Promote")
    desk.page.get_by_label("Reason").fill("it is better")
    desk.page.get_by_label("Your name").fill("Ada")
    desk.page.get_by_role("button", name="Promote it").click()
    decided(desk, "agent@3", "champion", "agent@3 serves")


@does("decide: reject")
def by_keyboard_a_policy_is_rejected(desk: Desk) -> None:
    desk.open("model/policies/agent@4")
    desk.enter("main a", "Reject")
    desk.page.wait_for_url("**/decide?**")
    desk.type("textarea[name=reason]", "too many complaints")
    desk.type("main input[name=who]", "Ada")
    desk.enter("main button", "Reject it for good")
    decided(desk, "agent@4", "rejected", "agent@4 is rejected for good")


@does("decide: rollback")
def by_keyboard_a_test_is_ended(desk: Desk) -> None:
    with desk.store("model") as store:
        store.ledger.move("agent@5", "canary", percent=10.0, who="test", reason="try it")
    desk.open("model/policies")
    desk.enter("main a", "End the test")
    desk.page.wait_for_url("**/decide?**")
    desk.type("main input[name=who]", "Ada")
    desk.enter("main button", "Roll back")
    desk.told("agent@5")
    with desk.store("model") as store:
        assert store.ledger.challenger() is None


@does("link")
def a_link_is_made_and_its_browser_leaves_by_keyboard(desk: Desk) -> None:
    desk.open("bot/system")
    desk.page.get_by_role("button", name="Make a one-time link").click()
    desk.page.wait_for_url("**/link")
    link = desk.page.get_by_label("The link").input_value()
    assert link.startswith(f"{desk.server.url}/enter#")
    desk.fine()
    assert desk.context.browser is not None
    other = desk.context.browser.new_context()
    guest = Desk(other, desk.server, desk.suite)
    guest.page.goto(link)
    guest.page.wait_for_selector("#live:has-text('Live')")
    assert "You may look." in guest.page.locator("footer").inner_text()
    second = Desk(other, desk.server, desk.suite)
    second.open("bot/")
    second.enter("header button", "Leave")
    second.page.wait_for_url("**/enter")
    second.fine()
    # The first page hears nothing any more, and says so.
    guest.page.wait_for_selector("#live:has-text('load the page again')", timeout=20_000)
    assert not second.wrong
    other.close()


def test_every_action_is_done_in_a_browser():
    paths = {action.path for action in ACTIONS}
    assert {name.partition(":")[0] if name.startswith("decide") else name for name in BY} == paths | {"link"}
    assert {name for name in BY if name.startswith("decide")} == {f"decide: {what}" for what in get_args(What)}
    assert 2 * sum("by_keyboard" in how.__name__ for how in BY.values()) >= len(BY)


# --- the server, the browser, and one desk for each action ---


@pytest.fixture(scope="module")
def desks(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Iterator[Iterator[Callable[[], Desk]]]:
    """For one action after the other, what makes its desk: wide and light, narrow and dark, ..."""
    home = tmp_path_factory.mktemp("home")
    suite, models = home / "suite.jsonl", with_engine(home, base)
    suite.write_text('{"name": "first", "messages": [{"role": "user", "content": "How much is a loaf?"}]}\n')
    with (
        pytest.MonkeyPatch.context() as patch,
        serve(EmbeddedEngine.from_pretrained(base, adapters_root=models.adapters)) as engine,
        served(grouped(home), models) as server,
        chromium() as browser,
    ):
        patch.setenv("ART_PATCH_SUITE", str(suite))
        with closing(open_store(models.store_url, project="model")) as store:
            store.ledger.set_engine(engine.client.base_url, who="test")
        state = entered(browser, server)

        def desk(size: str, scheme: Any) -> Desk:
            width, height = SIZES[size]
            sizes: Any = {"viewport": {"width": width, "height": height}, "color_scheme": scheme}
            return Desk(browser.new_context(storage_state=state, **sizes), server, suite)

        looks = cycle((("desktop", "light"), ("phone", "dark"), ("phone", "light"), ("desktop", "dark")))
        yield (lambda size=size, scheme=scheme: desk(size, scheme) for size, scheme in looks)


@pytest.fixture
def desk(desks: Iterator[Callable[[], Desk]]) -> Iterator[Desk]:
    made = next(desks)()
    yield made
    made.context.close()


@pytest.mark.parametrize("action", BY)
def test_an_action_in_a_browser(desk: Desk, action: str):
    BY[action](desk)


def test_what_is_refused_is_said_on_a_page_that_all_can_read(desk: Desk):
    """A score that is none, by keyboard; what is not there, a wrong parameter, an old page, and no cookie."""
    page = desk.page
    desk.open("bot/runs/d")
    desk.enter("summary", "Score it")
    desk.type("input[name=value]", "7")
    desk.type("form:has(input[name=value]) input[name=who]", "Ada")
    desk.page.keyboard.press("Enter")
    page.wait_for_selector("h1:has-text('Error 409')")
    assert "The value must be a number from 0 to 1." in page.locator("main").inner_text()
    desk.fine()
    for path, words in (
        ("bot/runs/nosuch", "there is no such run"),
        ("nosuch/", "your link is not for it"),
        ("bot/decide?what=canary&policy=agent@1&percent=500", "is no share of the sessions"),
        ("bot/runs?since=soon", "is neither a date"),
        ("bot/runs?days=1&sort=x", "sort"),
    ):
        desk.open(path)
        assert words in page.locator("main").inner_text(), path
        desk.fine()
    desk.open("bot/runs/d")
    page.get_by_text("Score it").click()
    page.evaluate("document.querySelector('main form [name=csrf]').value = 'old'")
    page.locator("main form input[name=who]").first.fill("Ada")
    page.get_by_role("button", name="Good").click()
    page.wait_for_selector("h1:has-text('Error 403')")
    desk.fine()
    page.context.clear_cookies()
    desk.open("bot/")
    assert "open the link that" in page.locator("main").inner_text()
    desk.fine()
    assert not [each for each in desk.wrong if _REFUSED not in each and not each.startswith("4")]


EVIL = """<form method=post action="{url}/p/bot/score-run/e"><input name=csrf value="{csrf}"><input name=who value=Eve>
<input name=name value=thumbs><input name=value value=0></form><script src="{url}/p/bot/"></script>"""


def test_a_page_of_another_port_neither_reads_nor_acts(desk: Desk):
    """Browsers send it our cookie, since cookies are shared by all ports of a machine; and it has guessed the token."""
    desk.open("bot/")
    evil = EVIL.format(url=desk.server.url, csrf=desk.page.locator("input[name=csrf]").first.input_value())

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(evil.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        page = desk.page
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        for path in ("/p/bot/live", "/api/v1/bot"):
            for mode in ("no-cors", "cors"):
                read = f"fetch('{desk.server.url}{path}', {{mode: '{mode}', credentials: 'include'}})"
                assert page.evaluate(f"{read}.then(() => 'read', () => 'refused')") == "refused", (path, mode)
        page.evaluate("document.forms[0].submit()")
        page.wait_for_url("**/score-run/e")
        assert "a change must come from a page of this server" in page.locator("body").inner_text()
        server.shutdown()
    with desk.store() as store:
        (run,) = store.read.trajectories(["e"])
    assert not [score for score in run.scores if score.judge == "Eve"]
