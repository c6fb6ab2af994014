"""The page on the store and the system, its parts, and what of them is on the overview."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from art_patch.settings import Settings, load_settings
from art_patch.store import HEAD, open_store
from art_patch.types import Call, TrajectoryInfo
from art_patch.web import Given
from tests.support.grouped import grouped
from tests.support.web import served


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    home = tmp_path_factory.mktemp("home")
    settings = grouped(home, notify="slack://secret-a/secret-b/secret-c jsons://host/secret-d", keep_days=30)
    store = open_store(settings.store_url, create=False, project="bot")
    with store.transfers.note_export("/tmp/runs.jsonl", "chat", who="Ann", now=20.0) as note:
        note.add(["a", "b"])
    store.rights.erase(trajectory="i", who="Bob", now=21.0)
    store.ledger.set_mode("canary", canary_percent=5.0, who="Ann")
    store.ledger.keep_verdict("agent@1", metrics={}, who="job", reason="it won", now=22.0)
    store.close()
    return settings


@pytest.fixture(scope="module")
def client(settings: Settings) -> Iterator[httpx.Client]:
    given = Given(arguments=["project", "keep_days"])
    with served(settings, given=given) as running, running.entered() as entered:
        yield entered


def facts(client: httpx.Client, path: str) -> Any:
    response = client.get(f"/api/v1/bot/{path}")
    assert response.status_code == 200, response.text
    assert client.get(f"/p/bot/{path}").status_code == 200
    return response.json()


def test_the_page_has_what_left_the_store_and_what_was_deleted(client: httpx.Client, settings: Settings):
    found = facts(client, "system")
    assert (found["database"], found["store"]) == ("SQLite", settings.store_url)
    assert found["retention"] == {"keep_days": 30.0, "keep_trajectories": None}
    assert [(each["path"], each["format"], each["trajectories"], each["who"]) for each in found["exports"]] == [
        ("/tmp/runs.jsonl", "chat", 2, "Ann")
    ]
    assert [(each["action"], each["who"]) for each in found["taken_away"]] == [("erased", "Bob"), ("erase", "Bob")]
    assert [each["action"] for each in found["audit"]][:2] == ["verdict", "mode"]
    assert found["versions"]["schema of the store"] == HEAD


def test_settings_say_where_they_come_from_and_keep_their_secrets(client: httpx.Client):
    found = facts(client, "system")["settings"]
    assert found["project"] == {"value": "bot", "source": "argument"}
    assert found["keep_days"] == {"value": 30.0, "source": "argument"}
    assert found["mode"] == {"value": "canary", "source": "store"}
    assert found["notify"] == {"value": "set, not shown", "source": "default"}
    assert facts(client, "system")["notifications"] == ["slack", "jsons"]
    assert "secret-" not in client.get("/p/bot/system").text


def test_the_audit_log_has_pages(client: httpx.Client):
    newest = facts(client, "system")["audit"]
    older = facts(client, f"system?before={newest[1]['id']}")["audit"]
    assert older == newest[2:]
    assert client.get("/p/bot/system?before=x").status_code == 422


def test_parts_that_take_long_are_pages_of_their_own(client: httpx.Client):
    page = client.get("/p/bot/system").text
    for part in ("size", "engine", "doctor"):
        assert f'hx-get="/p/bot/system/{part}" hx-select="#part-{part}"' in page
        assert f'id="part-{part}"' in client.get(f"/p/bot/system/{part}").text


def test_the_size_of_a_store_with_one_project(client: httpx.Client):
    found = facts(client, "system/size")
    assert found["projects"] == 1 and found["bytes"] > 0
    assert found["tables"]["calls"]["rows"] == 16
    assert found["calls_a_day"] == 0.0
    assert [each["calls"] for each in found["growth"]] == [0] * 30  # all were made half a century ago
    assert found["growth"][-1]["bytes"] == found["growth"][0]["bytes"] == pytest.approx(found["bytes"], rel=0.3)


def test_how_a_young_store_grew(tmp_path: Path):
    settings = load_settings(home=tmp_path, project="bot")
    settings.directory.mkdir(parents=True)
    now = time.time()
    with closing(open_store(settings.store_url, project="bot")) as store:
        for key, age in (("x", 6_000.0), ("y", 3_050.0), ("z", 10.0)):
            asked = ({"role": "user", "content": "?"},)
            store.write([TrajectoryInfo(key, now - age), Call(f"{key}-1", key, now - age, "m", asked)])
    with served(settings) as running, running.entered() as client:
        grown = facts(client, "system/size")["growth"]
        assert "As a table" in client.get("/p/bot/system/size").text
    assert [(place, each["calls"]) for place, each in enumerate(grown) if each["calls"]] == [(0, 1), (14, 1), (29, 1)]
    assert grown[0]["bytes"] * 3 == pytest.approx(grown[-1]["bytes"], abs=3)


def test_the_size_tells_nothing_of_other_projects(tmp_path: Path):
    settings = grouped(tmp_path, store=f"sqlite:///{tmp_path}/both.db")
    other = open_store(settings.store_url, project="other")
    other.close()
    with served(settings) as running, running.entered() as client:
        found = facts(client, "system/size")
        assert (found["tables"], found["trajectories"], found["projects"]) == (None, None, None)
        # With what a run of all takes on average, sizes would tell how many runs the others have.
        assert (found["bytes"], found["wal_bytes"], found["free_bytes"]) == (None, None, None)
        assert "Other projects share this store" in client.get("/p/bot/system/size").text


def test_without_an_engine_the_page_says_what_to_do(client: httpx.Client):
    assert facts(client, "system/engine") == {
        "engine": {"base_url": None, "healthy": False, "models": []},
        "servers": [],
    }
    assert "art-patch serve" in client.get("/p/bot/system/engine").text


def test_the_overview_has_what_is_red_or_yellow_and_what_waits(client: httpx.Client):
    found = facts(client, "system/doctor")
    red = [one for level in ("bad", "warn") for one in found["findings"] if one["level"] == level]
    overview = client.get("/api/v1/bot").json()
    assert overview["doctor"] == red
    assert overview["approvals"] == [{"policy": "agent@1", "since": 22.0, "reason": "it won"}]
    page = client.get("/p/bot/").text
    assert "agent@1" in page and "art-patch promote agent@1" in page


def test_only_who_may_act_can_make_links(client: httpx.Client, tmp_path: Path):
    assert 'action="/p/bot/link"' in client.get("/p/bot/system").text
    with served(grouped(tmp_path), role="look") as running, running.entered() as looker:
        assert 'action="/p/bot/link"' not in looker.get("/p/bot/system").text
