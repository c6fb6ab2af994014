"""What a person does with a run in the browser: score, correct, erase, and a test of the suite."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from art_patch.gate import read_suite
from art_patch.store import Store
from tests.support.run_samples import fill, write
from tests.support.web import Served, csrf_of, served
from tests.support.web_runs import ODD, hostile_run, project


@pytest.fixture
def acting(tmp_path: Path) -> Iterator[tuple[httpx.Client, Store, Served]]:
    settings, store = project(tmp_path, "shop")
    fill(store)
    run, spans = hostile_run(ODD)
    write(store, run)
    store.write(spans)
    with served(settings) as running, running.entered() as client:
        yield client, store, running
    store.close()


def test_a_person_scores_and_corrects(acting: tuple[httpx.Client, Store, Served]):
    client, store, _ = acting
    for path, key in ((f"runs/{quote(ODD, safe='')}", ODD), ("runs/plain", "plain")):
        page = client.get(f"/p/shop/{path}")
        token = {"csrf": csrf_of(page), "who": " Ann  B "}
        score, correct = (f"/p/shop/{what}-run/{quote(key, safe='')}" for what in ("score", "correct"))
        for value in ("0", "1"):
            form = {**token, "name": "thumbs", "value": value, "comment": "so\r\nso"}
            back = client.post(score, data=form, headers={"referer": f"{client.base_url}/p/shop/{path}"})
            assert (back.status_code, str(back.url.path)) == (200, f"/p/shop/{path.replace('%2F', '/')}") or key == ODD
        answer = "the\r\nright \u202e answer"
        call = store.read.trajectories([key])[0].calls[0].id
        form = {**token, "answer": answer, "how": "text", "call": quote(call, safe=""), "comment": "why"}
        client.post(correct, data=form)
        tools = [{"function": {"name": "f", "arguments": {"a": 1}}}]
        client.post(correct, data={**token, "answer": json.dumps({"tool_calls": tools}), "how": "json"})
        (run,) = store.read.trajectories([key])
        mine = [each for each in run.scores if each.source == "user"]
        assert [(each.name, each.value, each.comment, each.judge) for each in mine] == [
            ("thumbs", 1.0, "so\nso", "Ann B")
        ]
        first, second = store.evidence.corrections([key])[key]
        assert (first.message, first.call_id, first.comment, first.source) == (
            {"role": "assistant", "content": "the\nright \u202e answer"}, call, "why (Ann B)", "user",
        )  # fmt: skip
        assert (second.message["tool_calls"][0]["function"], second.comment) == (
            {"name": "f", "arguments": '{"a": 1}'}, "by Ann B",
        )  # fmt: skip


def test_what_cannot_be_kept_is_said(acting: tuple[httpx.Client, Store, Served]):
    client, store, running = acting
    token = {"csrf": csrf_of(client.get("/p/shop/runs/plain")), "who": "Ann"}
    before = store.read.counts()
    wrong: list[tuple[str, dict[str, str], int, str]] = [
        ("score-run/plain", {"name": "thumbs", "value": "0.5"}, 409, "The value must be 0 or 1."),
        ("score-run/plain", {"name": "reward", "value": "nan"}, 409, "The value must be a number from 0 to 1."),
        ("score-run/plain", {"name": " ", "value": "1"}, 409, "a score needs a name"),
        ("score-run/plain", {"name": "thumbs", "value": "1", "who": " "}, 409, "say who you are"),
        ("score-run/plain", {"name": "thumbs", "value": "1", "comment": "x" * 2_001}, 409, "That is too long"),
        ("score-run/gone", {"name": "thumbs", "value": "1"}, 404, "there is no run &#39;gone&#39; any more"),
        ("correct-run/plain", {"answer": " "}, 409, "a correction says what the right answer is"),
        ("correct-run/plain", {"answer": "{", "how": "json"}, 409, "the answer is not JSON"),
        ("correct-run/plain", {"answer": "[1]", "how": "json"}, 409, "a JSON object"),
        ("run-test/plain", {}, 409, "start it with ART_PATCH_SUITE=FILE"),
        ("score-run/plain", {"name": "thumbs", "value": "1", "csrf": "x"}, 403, "too old"),
    ]
    for path, form, status, words in wrong:
        answer = client.post(f"/p/shop/{path}", data=token | form)
        assert (answer.status_code, words in answer.text) == (status, True), (path, form, answer.text)
    token["csrf"] = ""
    with running.client(headers={"authorization": f"Bearer {running.key('shop')}"}) as program:
        assert program.post("/p/shop/score-run/plain", data=token | {"name": "thumbs", "value": "1"}).status_code == 403
    assert store.read.counts() == before


def test_a_run_is_erased_after_a_question(acting: tuple[httpx.Client, Store, Served]):
    client, store, _ = acting
    asked = client.get("/p/shop/erase-run/a0")
    assert "would erase trajectory a0: 1 trajectory, 2 calls" in asked.text
    assert store.read.known(["a0"]) == {"a0"}
    done = client.post("/p/shop/erase-run/a0", data={"csrf": csrf_of(asked), "who": "Ann"})
    assert (done.status_code, "erased trajectory a0: 1 trajectory, 2 calls" in done.text) == (200, True)
    assert "Backups that were made before hold it still." in done.text
    assert (store.read.known(["a0"]), client.get("/p/shop/runs/a0").status_code) == (frozenset(), 404)
    assert client.get("/p/shop/erase-run/a0").status_code == 404
    assert store.verify() == []


def test_a_run_becomes_a_test_of_the_suite(
    acting: tuple[httpx.Client, Store, Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    client, store, _ = acting
    told = client.get("/api/v1/shop/run-test/a0").json()
    assert (told["row"]["name"], told["file"], told["why_not"], told["call"]) == ("a0-2", None, None, "a0-2")
    assert json.loads(told["line"]) == told["row"]
    assert ([message["role"] for message in told["row"]["messages"]], told["row"]["temperature"]) == (
        ["system", "user", "assistant", "tool"], 1.0,
    )  # fmt: skip
    suite = tmp_path / "suite.jsonl"
    suite.write_text('{"messages": [{"role": "user", "content": "hi"}]}')  # no line end
    monkeypatch.setenv("ART_PATCH_SUITE", str(suite))
    page = client.get("/p/shop/run-test/a0", params={"call": "a0-1"})
    form = {"csrf": csrf_of(page), "who": "Ann", "call": "a0-1", "name": "plum"}
    done = client.post("/p/shop/run-test/a0", data=form)
    assert (done.status_code, "which has 2 prompts now" in done.text) == (200, True)
    assert [turn.scenario_key for turn in read_suite(suite)] == ["suite:1", "suite:plum"]
    assert len(read_suite(suite)[1].call.messages) == 2
    again = client.post("/p/shop/run-test/a0", data=form)
    assert (again.status_code, "named &#39;plum&#39; already" in again.text) == (409, True)
    store.consent.withdraw("user-a", who="test", now=9_000.0)
    assert "its user withdrew" in client.get("/p/shop/run-test/a0").text
    assert client.post("/p/shop/run-test/a0", data=form | {"name": "x"}).status_code == 409
    assert client.get("/p/shop/run-test/opened").status_code == 404
    assert len(suite.read_text().splitlines()) == 2


def test_who_may_only_look_sees_no_forms(tmp_path: Path):
    settings, store = project(tmp_path, "shop")
    fill(store)
    store.close()
    with served(settings, role="look") as running, running.entered() as client:
        page = client.get("/p/shop/runs/a0")
        token = {"csrf": csrf_of(page), "who": "Ann"}
        assert ("score-run" in page.text, "erase-run" in page.text, "run-test" in page.text) == (False, False, False)
        for path in ("score-run", "correct-run", "erase-run", "run-test"):
            assert client.post(f"/p/shop/{path}/a0", data=token).status_code == 403
