"""The pages on groups: the list with its filters and pages, and one group with two siblings side by side."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from art_patch.web.word_diff import MOST_CHARS, MOST_WORDS, compared, pieces_of, said
from tests.support.grouped import grouped
from tests.support.web import served


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with served(grouped(tmp_path_factory.mktemp("home"))) as running, running.entered() as entered:
        yield entered


def facts(client: httpx.Client, path: str) -> Any:
    response = client.get(f"/api/v1/bot/{path}")
    assert response.status_code == 200, response.text
    return response.json()


def test_the_list_has_all_groups_with_their_rewards_and_states(client: httpx.Client):
    found = facts(client, "groups")
    assert [(each["state"], each["groups"]) for each in found["states"]] == [
        ("dead", 1), ("formed", 1), ("quarantined", 1), ("trained", 1),
    ]  # fmt: skip
    assert found["groups"][-1] == {
        "id": "g1", "scenario_key": "task g1", "how": "same_task", "held_out": False, "created_at": 5.0,
        "state": "trained", "reason": None, "runs": 3, "rewards": [0.0, 0.5, 1.0], "trained": ["agent@1"],
        "opening": "What do 3 loaves cost?",
    }  # fmt: skip
    assert [each["id"] for each in found["groups"]] == ["g4", "g3", "g2", "g1"]
    assert found["before"] is None


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ("state=dead", ["g3"]), ("scenario=task%20g2", ["g2"]), ("policy=agent@1", ["g1"]), ("held_out=yes", ["g4"]),
        ("held_out=no&state=", ["g3", "g2", "g1"]), ("before=g3", ["g2", "g1"]), ("state=none", []),
    ],
)  # fmt: skip
def test_filters_are_in_the_address(client: httpx.Client, query: str, ids: list[str]):
    assert [each["id"] for each in facts(client, f"groups?{query}")["groups"]] == ids
    assert client.get(f"/p/bot/groups?{query}").status_code == 200


def test_a_group_shows_what_it_taught_and_what_the_judge_said_in_both_orders(client: httpx.Client):
    found = facts(client, "groups/g1")
    assert [each["id"] for each in found["siblings"]] == ["a", "b", "c"]
    first, second, third = found["siblings"]
    assert first["taught"] == [
        {"policy": "agent@1", "trajectory_id": "a", "advantages": [1.0, 1.5], "weights": [1.0, 1.0]}
    ]
    assert third["taught"] == []
    assert second["both_ways"] == {"scores": [0.6, 0.4], "ranks": [2, 2]}
    assert [(one["name"], one["value"], one["comment"]) for one in second["scores"]] == [("ruler", 0.5, "off by one")]
    assert (found["means"], found["noise"], found["judged_twice"]) == ("an update has learned from it", 0.05, True)
    assert (found["compared"]["left"], found["compared"]["right"], found["compared"]["shared_count"]) == ("a", "c", 3)
    page = client.get("/p/bot/groups/g1").text
    assert "off by one" in page and "advantage +1.00 to +1.50" in page and 'href="/p/bot/runs/a"' in page
    assert "<b>cannot" not in page and "&lt;b&gt;cannot" in page


def test_a_group_says_which_update_learned_from_it_or_why_none_did(client: httpx.Client):
    (update,) = facts(client, "groups/g1")["updates"]
    assert (update["policy"], update["siblings"], update["advantages"]) == ("agent@1", 2, [-0.5, 1.0, 1.5])
    assert [facts(client, f"groups/{key}")["why_not"] for key in ("g1", "g2", "g3", "g4")] == [
        None, "the judge prefers another one in the other order", "all siblings were scored alike",
        "it is held out: the gate compares policies on it, so no update may learn from it",
    ]  # fmt: skip
    assert "Nothing: it is held out" in client.get("/p/bot/groups/g4").text


def test_a_group_says_why_it_is_put_aside(client: httpx.Client):
    page = client.get("/p/bot/groups/g2").text
    assert "the judge prefers another one in the other order" in page
    assert "disagreed with itself" in page
    assert [each["both_ways"]["ranks"] for each in facts(client, "groups/g2")["siblings"]] == [[1, 2], [2, 1]]


def test_any_two_siblings_are_compared(client: httpx.Client):
    both = facts(client, "groups/g1?left=b&right=a")["compared"]
    assert (both["left"], both["right"]) == ("b", "a")
    assert both["pairs"] == [
        {
            "left": {"role": "assistant", "pieces": [["same", "They cost "], ["only", "13."]], "cut": 0},
            "right": {"role": "assistant", "pieces": [["same", "They cost "], ["only", "12."]], "cut": 0},
        }
    ]
    assert "Both said the same." in client.get("/p/bot/groups/g3").text


@pytest.mark.parametrize("path", ["groups/none", "groups/g", "groups/g1?left=h", "groups/%00"])
def test_what_is_not_there_is_said_to_be_not_there(client: httpx.Client, path: str):
    assert client.get(f"/api/v1/bot/{path}").status_code == 404
    assert client.get(f"/p/bot/{path}").status_code == 404


def test_an_empty_project_says_what_to_do(tmp_path: Path):
    from art_patch.settings import load_settings
    from art_patch.store import open_store

    settings = load_settings(home=tmp_path, project="new")
    settings.directory.mkdir(parents=True)
    open_store(settings.store_url, project="new").close()
    with served(settings) as running, running.entered() as client:
        assert "art-patch score" in client.get("/p/new/groups").text
        assert "art-patch score" in client.get("/p/new/review").text


def test_words_are_compared_without_the_space_behind_them():
    assert pieces_of("a b  c", "a c") == (
        [("same", "a "), ("only", "b  "), ("same", "c")],
        [("same", "a "), ("same", "c")],
    )
    assert pieces_of("", "x") == ([], [("only", "x")])


def test_no_texts_make_a_comparison_slow():
    words = ["word"] * 199, [each for number in range(400) for each in ("word", str(number))]
    few, many = ({"role": "assistant", "content": " ".join(side)} for side in words)
    began = time.process_time()
    pairs = compared([many] * 40, [few] * 40)["pairs"]
    assert time.process_time() - began < 4  # it was half a minute
    assert all("".join(text for _, text in pair["right"]["pieces"]) == few["content"] for pair in pairs)
    often, once = ("the " * 13 + end for end in ("end", "stop"))
    assert pieces_of(often, once) == (
        [("same", "the " * 13), ("only", "end")],
        [("same", "the " * 13), ("only", "stop")],
    )


def test_long_texts_are_cut_and_the_rest_is_counted():
    long, other = ({"role": "assistant", "content": text * 10_000} for text in ("ab ", "ba "))
    (pair,) = compared([long], [other])["pairs"]
    shown = "".join(text for _, text in pair["left"]["pieces"])
    assert len(shown.split()) == MOST_WORDS and pair["left"]["cut"] == 30_000 - len(shown)
    (pair,) = compared([{"role": "user", "content": "x" * 20_000}], [])["pairs"]
    assert (pair["left"]["cut"], pair["right"]) == (20_000 - MOST_CHARS, None)


def test_all_that_a_message_says_is_shown():
    call = {"id": "1", "function": {"name": "price", "arguments": '{"item": 1}'}}
    parts = [{"type": "text", "text": "look"}, {"type": "image_url"}]
    message = {"role": "assistant", "reasoning": "hm", "content": parts, "tool_calls": [call]}
    assert said(message) == 'hm\nlook\n[image_url]\nprice({"item": 1})'
