"""The first page: who answered, what was saved, what is queued, and what runs and waits."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from art_patch.cli.app import app
from art_patch.pipeline.running_cycle import noting
from art_patch.settings import Settings
from art_patch.store import open_store
from art_patch.types import AppReport, Call, Choice, TrajectoryInfo
from art_patch.web import Given
from tests.support.web import served
from tests.support.web_store import make_project

PRICED = Given(prices=lambda _: (0.25, 2.0), gpu_usd_per_hour=0.5)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return make_project(tmp_path_factory.mktemp("home"), runs=48)


def overview(client: httpx.Client, until: Callable[[Any], bool] = lambda found: found["money"] is not None) -> Any:
    """The facts, once they are as `until` wants them: money is counted in the background."""
    found = None
    for _ in range(200):
        found = client.get("/api/v1/shop").json()
        if until(found):
            return found
        time.sleep(0.05)
    raise AssertionError(found)


def test_what_was_saved_is_what_the_report_says(settings: Settings):
    options = ["--home", str(settings.home), "--project", "shop", "--upstream-price", "0.25", "2", "--json"]
    command = ["report", *options, "--gpu-usd-per-hour", "0.5"]
    told = json.loads(CliRunner().invoke(app, command).stdout)["money"]
    assert told["avoided_usd"] > 0
    with served(settings, given=PRICED) as running, running.entered() as client:
        found = overview(client)["money"]
        page = client.get("/p/shop/").text
    assert found.pop("until") - found.pop("since") == pytest.approx(7 * 86_400)
    assert found.pop("days") == 7
    # The engine never told since when it serves, so its GPU counts for the whole time, which has moved on since.
    assert {name: value if isinstance(value, list) else round(value, 3) for name, value in found.items()} == {
        name: value if isinstance(value, list) else round(value, 3) for name, value in told.items()
    }
    assert "no engine told since when it serves" in page
    assert f'data-fact="Saved">-${-found["saved_usd"]:,.2f}<' in page


def test_without_prices_what_was_saved_is_unknown(settings: Settings):
    with served(settings) as running, running.entered() as client:
        found = overview(client)["money"]
        page = client.get("/p/shop/").text
    assert (found["saved_usd"], found["avoided_usd"], found["gpu_usd"]) == (None, None, None)
    assert 'data-fact="Saved">unknown<' in page
    assert "no price is known for gpt-5: give --upstream-price IN OUT" in page


def test_who_answered_which_share_of_the_calls(tmp_path: Path):
    settings = make_project(tmp_path, runs=48)
    now = time.time()
    shadowed: dict[str, Any] = {"choices": (Choice(0, {"role": "assistant", "content": "12"}, "stop"),)}
    with closing(open_store(settings.store_url, project="shop")) as store:
        by = {each.policy: each.calls for each in store.reports.recent(since=now - 14 * 86_400)}
        asked = ({"role": "user", "content": "?"},)
        store.write([
            TrajectoryInfo("more", now - 60, "explicit"),
            Call("fell", "more", now - 60, "gpt-5", asked, fallback="timeout", **shadowed),
            Call("canary", "more", now - 50, "gpt-5", asked, policy="agent@6", **shadowed),
            TrajectoryInfo("copy", now - 40, "shadow"),
            Call("copied", "copy", now - 40, "gpt-5", asked, policy="agent@6", shadow_of="canary", **shadowed),
        ])  # fmt: skip
    everything = sum(by.values()) + 2
    with served(settings) as running, running.entered() as client:
        found = overview(client)
        page = client.get("/p/shop/").text
    assert found["shares"] == {
        "calls": everything, "routed": everything - by[None] - 1, "canary": by.get("agent@6", 0) + 1, "fell_back": 1,
        "copies": 1,
    }  # fmt: skip
    for words in ("Routed", "canary agent@6", "fallbacks", "Shadow"):
        assert words in page
    tokens = sum(value or 0 for values in found["series"]["tokens"].values() for value in values)
    answered = [each for period in found["periods"] for each in period["answered"]]
    assert tokens == sum(each["prompt_tokens"] + each["completion_tokens"] for each in answered) > 0


def test_apps_tell_version_mode_queue_and_drops(settings: Settings):
    now = time.time()
    told = {"art_patch": "0.9.0", "mode": "shadow", "queued": 3, "dropped": 2, "recorded": 7}
    with closing(open_store(settings.store_url, project="shop")) as store:
        store.write([AppReport("web:17", now - 5, told), AppReport("other:1", now - 9, {"queued": "many"})])
    with served(settings) as running, running.entered() as client:
        assert overview(client)["queue"] == {"queued": 3, "dropped": 2}
        page = client.get("/p/shop/").text
        assert client.get("/status").json()["queue"] == {"queued": 3, "dropped": 2}
    assert "3 calls wait to be written; 2 calls were dropped" in page
    row = page.partition("<td>web:17</td>")[2].partition("</tr>")[0]
    assert [cell for cell in ("0.9.0", "shadow", ">3<", ">7<", ">2<") if cell not in row] == []


def test_the_control_group_is_told_in_words(settings: Settings):
    side = {"sessions": 30}
    look: dict[str, Any] = {
        "policy": "agent@5",
        "at": time.time(),
        "says": "open",
        "begin": 0.0,
        "champion": side,
        "upstream": side,
        "signals": {},
        "days_to_notice": {},
    }
    with closing(open_store(settings.store_url, project="shop")) as store:
        store.ledger.set_control_group(10.0, who="test")
        store.ledger.keep_control_look(look)
    with served(settings) as running, running.entered() as client:
        told = client.get("/status").json()
        page = client.get("/p/shop/").text
    assert told["control_percent"] == 10.0
    assert "30 sessions against 30" in told["control"]
    assert f"of the sessions stay with upstream; {told['control']}" in page


def test_the_cycle_that_runs_is_on_the_first_page(settings: Settings):
    def nothing(stage: str, done: int, total: int, note: str = "") -> None:
        pass

    with served(settings) as running, running.entered() as client:
        assert overview(client)["cycle"] is None
        with noting(settings.directory, nothing, who="cron", began_at=time.time() - 3_000) as note:
            note("train", 3, 48)
            assert client.get("/status").json()["cycle"]["who"] == "cron"
            assert "has run for 50 min: train, 3 of 48" in client.get("/p/shop/").text
