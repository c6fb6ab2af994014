"""The page on which people review: pairs are blind, answers become people's scores, and agreement is counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from art_patch.rewards import PEOPLE, disagreement
from art_patch.settings import Settings
from art_patch.store import Store, open_store
from art_patch.types import Group, Trajectory, TrajectoryInfo
from tests.support.grouped import grouped, run
from tests.support.web import Served, csrf_of, served


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Served]:
    with served(grouped(tmp_path)) as running:
        yield running


@pytest.fixture
def client(running: Served) -> Iterator[httpx.Client]:
    with running.entered() as client:
        yield client


def opened(running: Served) -> Store:
    settings: Settings = running.settings["bot"]
    return open_store(settings.store_url, create=False, project="bot")


def shown(client: httpx.Client, query: str = "") -> Any:
    response = client.get(f"/api/v1/bot/review{query}")
    assert response.status_code == 200, response.text
    return response.json()


def post(client: httpx.Client, path: str, **form: str) -> httpx.Response:
    csrf = csrf_of(client.get("/p/bot/review"))
    return client.post(f"/p/bot/review/{path}", data={"csrf": csrf, "who": "Ann", **form})


def form_of(item: Any) -> dict[str, str]:
    return {"group": item["group"], "left": item["sides"][0]["run"], "right": item["sides"][1]["run"]}


def test_a_pair_is_shown_without_who_answered_and_what_the_judge_said(client: httpx.Client):
    found = shown(client)
    assert found["item"]["group"] in ("g1", "g2")  # never of g3, whose siblings say the same, nor of g4, held out
    assert (found["kind"], found["is_more"], found["answered"]) == ("pairs", True, None)
    assert found["agreement"] == {
        "pairs": 0,
        "against": 0,
        "tied": 0,
        "groups": 0,
        "decided": 0,
        "agrees": 0,
        "share": None,
    }
    assert [side.keys() for side in found["item"]["sides"]] == [{"run", "thumb", "corrected", "answer"}] * 2
    for text in (client.get("/api/v1/bot/review").text, client.get("/p/bot/review").text.partition("<main")[2]):
        assert not any(word in text for word in ("agent@0", "upstream", "off by one", "gave up", "quarantined"))


def test_the_judge_is_least_sure_where_it_turned_siblings_around(client: httpx.Client):
    assert shown(client, "?kind=unsure")["item"]["group"] == "g2"
    skipped = shown(client, "?kind=unsure&after=" + shown(client, "?kind=unsure")["item"]["key"])
    assert skipped["item"]["group"] == "g1"


def test_a_skipped_pair_comes_last(client: httpx.Client):
    first = shown(client)["item"]
    second = shown(client, f"?after={first['key']}")["item"]
    assert {first["group"], second["group"]} == {"g1", "g2"}
    assert shown(client, f"?after={second['key']}")["item"] == first


@pytest.mark.parametrize(("choice", "values"), [("left", [1.0, 0.0]), ("right", [0.0, 1.0]), ("tie", [0.5, 0.5])])
def test_a_preference_becomes_scores_of_people_that_the_judge_is_compared_with(
    running: Served, client: httpx.Client, choice: str, values: list[float]
):
    item = shown(client, "?group=g2")["item"]
    answered = post(client, "prefer", **form_of(item), choice=choice, comment="as <i>said</i>")
    assert answered.status_code == 200 and "answered=g2" in str(answered.url)
    assert "Answered by" not in answered.text and "answered by agent@0, judged 0.40" in answered.text
    store = opened(running)
    runs = [side["run"] for side in item["sides"]]
    given = [next(one for one in store.groups.scores([key])[key] if one.source == "user") for key in runs]
    assert [(one.trajectory_id, one.name, one.value) for one in given] == [
        (key, "feedback", value) for key, value in zip(runs, values, strict=True)
    ]
    assert "feedback" in PEOPLE and all("Ann (art-patch web: review)" in str(one.comment) for one in given)
    assert all(str(one.comment).endswith("as <i>said</i>") for one in given)
    counted = disagreement(store.evidence.opinions(PEOPLE))
    judge_prefers = "left" if runs[0] == "e" else "right"
    assert (counted.pairs, counted.against) == ((0, 0) if choice == "tie" else (1, int(choice != judge_prefers)))
    store.close()
    # The pair has left the queue, and another answer replaces the first.
    assert shown(client)["item"]["group"] == "g1"
    assert post(client, "prefer", **form_of(item), choice="tie").status_code == 200
    found = shown(client, "?answered=g2")["answered"]
    assert [side["preferred"] for side in found["sides"]] == [0.5, 0.5] and found["agrees"] is None


def test_an_answer_tells_whether_the_judge_agrees(client: httpx.Client):
    item = shown(client, "?group=g2")["item"]
    better = "left" if item["sides"][0]["run"] == "e" else "right"  # the judge scored e 0.6 and d 0.4
    page = post(client, "prefer", **form_of(item), choice=better)
    assert "The judge agrees with your last answer" in page.text
    found = shown(client, "?answered=g2")["answered"]
    assert found["agrees"] is True
    assert sorted((one["run"], one["judged"], one["policies"]) for one in found["sides"]) == [
        ("d", 0.4, ["agent@0"]), ("e", 0.6, ["agent@0"]),
    ]  # fmt: skip


def test_when_all_is_answered_the_page_says_so(client: httpx.Client):
    for _ in range(2):
        post(client, "prefer", **form_of(shown(client)["item"]), choice="left")
    found = shown(client)
    assert (found["item"], found["is_more"]) == (None, False)
    assert "No pair waits here" in client.get("/p/bot/review").text
    assert "No pair waits here" in client.get("/p/bot/review?kind=unsure").text


def test_thumbs_and_right_answers_are_kept_once(running: Served, client: httpx.Client):
    for thumb in ("up", "down"):
        assert post(client, "thumb", run="a", thumb=thumb).status_code == 200
    for answer in ("Twelve.", '{"role": "assistant", "tool_calls": [{"function": {"name": "price"}}]}'):
        assert post(client, "correct", run="a", answer=answer).status_code == 200
    store = opened(running)
    thumbs = [one.value for one in store.groups.scores(["a"])["a"] if one.name == "thumbs"]
    (correction,) = store.evidence.corrections(["a"])["a"]
    assert thumbs == [0.0]
    assert correction.message["tool_calls"][0]["function"] == {"name": "price", "arguments": "{}"}
    assert store.evidence.corrected(since=0.0, limit=9) == ("a",)
    store.close()
    post(client, "correct", run="b", answer="{not json")
    sides = {side["run"]: side for side in shown(client, "?group=g1")["item"]["sides"]}
    assert all(not side["corrected"] or side["answer"] for side in sides.values())


@pytest.mark.parametrize(
    ("path", "form", "status"),
    [
        ("prefer", {"group": "g2", "left": "d", "right": "a", "choice": "left"}, 404),
        ("prefer", {"group": "g4", "choice": "left"}, 404),
        ("prefer", {"group": "none", "choice": "left"}, 404),
        ("thumb", {"run": "a", "thumb": "sideways"}, 409),
        ("thumb", {"run": "a", "thumb": "up", "who": " "}, 409),
        ("thumb", {"run": "erased", "thumb": "up"}, 404),
        ("correct", {"run": "a", "answer": "  "}, 409),
        ("correct", {"run": "a", "answer": "x", "comment": "y" * 3_000}, 409),
    ],
)
def test_what_cannot_be_kept_is_refused(client: httpx.Client, path: str, form: dict[str, str], status: int):
    assert post(client, path, **form).status_code == status


def test_who_may_look_only_sees_no_form(tmp_path: Path):
    with served(grouped(tmp_path), role="look") as running, running.entered() as client:
        page = client.get("/p/bot/review")
        assert "for looking only" in page.text and "review/prefer" not in page.text
        refused = client.post(
            "/p/bot/review/thumb", data={"csrf": csrf_of(page), "who": "A", "run": "a", "thumb": "up"}
        )
        assert refused.status_code == 403


def test_runs_that_may_not_be_learned_from_are_not_reviewed(running: Served, client: httpx.Client):
    store = opened(running)
    for key, learn in (("x", True), ("y", False)):
        run(store, key, f"{key} answers", learn=learn)
    members = tuple(Trajectory(TrajectoryInfo(key, 1.0), ()) for key in ("x", "y"))
    store.ledger.add_groups([Group("g9", "task g9", "same_task", members)], now=9.0)
    store.close()
    assert client.get("/api/v1/bot/review?group=g9").status_code == 404
    assert shown(client)["item"]["group"] != "g9"


def test_secrets_in_a_comment_are_removed_where_the_project_says_so(tmp_path: Path):
    with served(grouped(tmp_path, redact="secrets")) as running, running.entered() as client:
        post(client, "thumb", run="a", thumb="up", comment="my key is sk-abcdefghijklmnopqrstuvwxyz0123456789AB")
        store = opened(running)
        comments = " ".join(str(one.comment) for one in store.groups.scores(["a"])["a"])
        store.close()
        assert "my key is" in comments and "abcdefghij" not in comments
