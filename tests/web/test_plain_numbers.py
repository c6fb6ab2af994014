"""Numbers and words that are easily misread: of how many, of whom, since when, in which zone, and what is not known."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import closing
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from art_patch.cli.app import app
from art_patch.pipeline import CycleReport
from art_patch.pipeline.cycle_run import write_report
from art_patch.settings import Settings, load_settings
from art_patch.store import open_store
from art_patch.types import Call, Choice, TrajectoryInfo
from tests.support.web import served
from tests.support.web_store import make_project


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return make_project(tmp_path_factory.mktemp("home"), runs=48)


@pytest.fixture(scope="module")
def client(settings: Settings) -> Iterator[httpx.Client]:
    with served(settings) as running, running.entered() as entered:
        yield entered


@pytest.fixture
def empty(tmp_path: Path) -> Settings:
    settings = load_settings(home=tmp_path, project="bot")
    settings.directory.mkdir(parents=True)
    open_store(settings.store_url, project="bot").close()
    return settings


def shown(client: httpx.Client, path: str) -> str:
    """The words of a page, without its tags."""
    page = client.get(path)
    assert page.status_code == 200, page.text
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", page.text)).split())


def test_success_and_reward_say_of_how_many_runs(client: httpx.Client):
    words = shown(client, "/p/shop/")
    for period in client.get("/api/v1/shop").json()["periods"]:
        for one in period["answered"]:
            if one["known"] and one["rewarded"]:
                share = one["succeeded"] / one["known"]
                assert f"{one['reward']:.2f} of {one['rewarded']} {share:.1%} of {one['known']}" in words


def test_what_an_agent_did_on_a_day_is_one_click_from_the_table(client: httpx.Client):
    page, many = client.get("/p/shop/").text, 0
    links = [unescape(link) for link in re.findall(r'<td><a href="(/p/shop/runs\?[^"]*)"', page)]
    rows = [one for period in client.get("/api/v1/shop").json()["periods"][::-1] for one in period["answered"]]
    for link, one in zip(links, rows, strict=True):
        found = client.get(link.replace("/p/", "/api/v1/", 1)).json()
        assert found["wrong"] is None
        assert {run["policies"][0] for run in found["runs"]} <= {one["policy"] or "upstream"}
        many += found["total"]["runs"]
    assert many == 48


def test_copies_are_no_share_of_the_calls(tmp_path: Path):
    settings = make_project(tmp_path, runs=8)
    now, asked = time.time(), ({"role": "user", "content": "?"},)
    answer = (Choice(0, {"role": "assistant", "content": "12"}, "stop"),)
    with closing(open_store(settings.store_url, project="shop")) as store:
        for number in range(30):
            key = f"sampled-{number}"
            call = Call(key, key, now - 40, "gpt-5", asked, answer, policy="agent@6", shadow_of="x")
            store.write([TrajectoryInfo(key, now - 40, "resampled"), call])
    with served(settings) as running, running.entered() as client:
        words = shown(client, "/p/shop/")
        size = client.get("/api/v1/shop/system/size").json()
    assert "in the background: no user saw these answers 30 - " in words
    # Copies take room as calls do.
    assert size["calls_a_day"] * size["rate_days"] >= 30


def test_how_a_store_grew_on_its_first_day_is_no_rate_of_a_week(empty: Settings):
    with closing(open_store(empty.store_url, project="bot")) as store:
        asked = ({"role": "user", "content": "?"},)
        store.write([TrajectoryInfo("x", time.time() - 60), Call("x-1", "x", time.time() - 60, "m", asked)])
    with served(empty) as running, running.entered() as client:
        assert "on its first day so far, by 1 calls, copies among them" in shown(client, "/p/bot/system/size")


def test_times_name_their_zone(empty: Settings, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "Asia/Kolkata")
        time.tzset()
        with served(empty) as running, running.entered() as client:
            page = client.get("/p/bot/").text
    time.tzset()
    assert "Times: UTC+05:30" in page
    assert 'data-offset="19800"' in page


def test_who_serves_without_an_engine_is_not_told_as_if_it_answered(client: httpx.Client, empty: Settings):
    assert "no engine runs, so upstream answers its calls" in shown(client, "/p/shop/")
    with served(empty) as running, running.entered() as other:
        words = shown(other, "/p/bot/")
    assert "no engine runs" not in words
    assert "calls go to the policy that serves, once there is one" in words


def test_where_a_mode_lets_upstream_answer_no_policy_is_told_to(tmp_path: Path):
    settings = make_project(tmp_path, runs=8)
    with closing(open_store(settings.store_url, project="shop")) as store:
        store.ledger.set_mode("record", who="ada")
    with served(settings) as running, running.entered() as client:
        assert "in mode record upstream answers" in shown(client, "/p/shop/")
        whatever = "Mode record: upstream answers every call, whatever the shares below are."
        assert whatever in shown(client, "/p/shop/policies")
        words = shown(client, "/p/shop/policies/agent@5")
    assert "In mode record upstream answers." in words
    assert "It answers" not in words


def test_what_needs_a_person_is_always_told(empty: Settings):
    with served(empty) as running, running.entered() as client:
        assert "Needs a person The doctor is looking" in shown(client, "/p/bot/")


def test_a_canarys_share_stands_beside_each_decision(client: httpx.Client):
    for path in ("", "policies", "policies/agent@6"):
        assert "canary 20 %" in shown(client, f"/p/shop/{path}"), path


def test_a_champions_share_is_told_beside_the_control_group(tmp_path: Path):
    settings = make_project(tmp_path, runs=8)
    with closing(open_store(settings.store_url, project="shop")) as store:
        store.ledger.set_control_group(5.0, who="ada")
    with served(settings) as running, running.entered() as client:
        assert "80 % of the sessions, but for those of the control group." in shown(client, "/p/shop/policies/agent@5")
        assert "5 % of the sessions stay with upstream; the shares below are of the others" in shown(
            client, "/p/shop/policies"
        )


def test_a_judge_without_prices_costs_an_unknown_amount_and_no_part_of_one(empty: Settings):
    costs: tuple[dict[str, Any], ...] = (
        {"score": {"cost_usd": None}},
        {"score": {"cost_usd": 0.5}, "gate": {"cost_usd": None}},
    )
    for number, metrics in enumerate(costs):
        report = CycleReport("nothing to do", "", None, None, metrics)
        write_report(report, empty.directory, who="ada", began_at=100.0 + number, took_s=1.0, stages_s={})
    with served(empty) as running, running.entered() as client:
        partly, unknown = (each["id"] for each in client.get("/api/v1/bot/cycles").json()["cycles"])
        assert "The judge cost unknown Why" in shown(client, f"/p/bot/cycles/{unknown}")
        assert "The judge cost $0.50 or more: some of its prices are unknown" in shown(
            client, f"/p/bot/cycles/{partly}"
        )


def test_what_was_paid_for_erased_runs_is_not_told_as_nothing(tmp_path: Path):
    settings = make_project(tmp_path, runs=8)
    options = ["--home", str(tmp_path), "--project", "shop"]
    with served(settings) as running, running.entered() as client:
        for run in client.get("/api/v1/shop/runs").json()["runs"]:
            erased = CliRunner().invoke(app, ["erase", *options, "--trajectory", run["id"], "--yes"])
            assert erased.exit_code == 0, erased.output
    note = "runs erased since this time began: 8; what was paid for them is not counted"
    told = json.loads(CliRunner().invoke(app, ["report", *options, "--json"]).stdout)["money"]
    assert note in told["notes"]
    with served(settings) as running, running.entered() as client:
        until = time.monotonic() + 30
        while client.get("/api/v1/shop").json()["money"] is None:  # counted in the background
            assert time.monotonic() < until
            time.sleep(0.05)
        words = shown(client, "/p/shop/")
        assert note in words
        assert "No call of these days is in the store." in words  # there were some
        assert "No run is in the store." in shown(client, "/p/shop/runs")


def test_a_held_out_group_is_not_said_to_wait_for_rewards_that_it_has(client: httpx.Client):
    groups = client.get("/api/v1/shop/groups?held_out=yes").json()["groups"]
    held_out = next(each for each in groups if each["rewards"])
    words = shown(client, f"/p/shop/groups/{held_out['id']}")
    assert "formed the judge has not scored its siblings, as those of each held-out group" in words
