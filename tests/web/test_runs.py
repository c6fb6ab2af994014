"""The page "Runs": it finds what `art-patch trajectories list` finds, and one run is shown whole and harmless."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import httpx
import pytest
from typer.testing import CliRunner

from art_patch.cli.app import app
from art_patch.store import open_store
from art_patch.types import Call, Correction, Group
from art_patch.web.run import advantage_level, logprob_level, token_texts
from tests.support.run_samples import fill, tool_run, write
from tests.support.web import Served, served
from tests.support.web_runs import EVIL, ODD, Tags, hostile_run, learned_run, project


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("home")
    settings, store = project(home, "shop")
    fill(store)
    learned_run(store)
    for key in (ODD, "evil"):
        run, spans = hostile_run(key)
        write(store, run)
        store.write(
            [*spans, Correction(f"{key}c", key, 9.0, "user", {"role": "assistant", "content": EVIL}, comment=EVIL)]
        )
    store.ledger.add_groups([Group("evil-group", EVIL, "same_task", (hostile_run("evil")[0],))], now=1_300.0)
    store.search.extend()
    store.close()
    with served(settings, project(home, "empty")[0]) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[httpx.Client]:
    with server.entered("shop") as entered:
        yield entered


def facts(client: httpx.Client, path: str, **query: Any) -> dict[str, Any]:
    response = client.get(f"/api/v1/shop/{path}", params=query)
    assert response.status_code == 200, response.text
    return response.json()


# --- the list ---

ALIKE: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"user": "user-a"}, ["--user", "user-a"]),
    ({"session": "session-1"}, ["--session", "session-1"]),
    ({"name": "fruit"}, ["--name", "fruit"]),
    ({"scenario": "plum"}, ["--scenario", "plum"]),
    ({"group": "fig-group"}, ["--group", "fig-group"]),
    ({"tag": "é"}, ["--tag", "é"]),
    ({"policy": "agent@1"}, ["--policy", "agent@1"]),
    ({"policy": "upstream"}, ["--policy", "upstream"]),
    ({"model": "gpt-5"}, ["--model", "gpt-5"]),
    ({"min_reward": "0.5"}, ["--min-reward", "0.5"]),
    ({"max_reward": "0.5"}, ["--max-reward", "0.5"]),
    ({"status": "error"}, ["--status", "error"]),
    ({"status": "ok", "trainable": "no"}, ["--status", "ok", "--not-trainable"]),
    ({"trainable": "yes"}, ["--trainable"]),
    ({"untrainable": "By Upstream"}, ["--untrainable", "By Upstream"]),
    ({"error": "TIMEOUT"}, ["--error", "TIMEOUT"]),
    ({"slower_than": "400ms"}, ["--slower-than", "400ms"]),
    ({"origin": "shadow"}, ["--origin", "shadow"]),
    ({"since": "1970-01-01T00:30+00:00"}, ["--since", "1970-01-01T00:30+00:00"]),
    ({"until": "1970-01-01T00:30+00:00"}, ["--until", "1970-01-01T00:30+00:00"]),
    ({"search": "plum"}, ["--search", "plum"]),
    ({"search": '"is a plum"', "user": "user-a"}, ["--search", '"is a plum"', "--user", "user-a"]),
    ({"tool": "lookup", "sort": "reward"}, ["--tool", "lookup", "--sort", "reward"]),
    ({"sort": "latency"}, ["--sort", "latency"]),
    ({"user": "nobody"}, ["--user", "nobody"]),
]


@pytest.mark.parametrize(("query", "options"), ALIKE)
def test_what_matches_is_what_the_command_lists(server: Served, client: httpx.Client, query: Any, options: list[str]):
    home = str(server.settings["shop"].directory.parent)
    command = ["trajectories", "list", "--home", home, "--project", "shop", "--json", "-n", "50", *options]
    told = json.loads(CliRunner().invoke(app, command).stdout)["trajectories"]
    empty = dict.fromkeys(("search", "tag", "min_reward", "until", "status"), "")  # a form sends all of its fields
    found = facts(client, "runs", **empty | query)
    assert [json.loads(json.dumps(one)) for one in found["runs"]] == [one for one in told if one["opening"] is not None]
    assert (found["wrong"], found["next"], found["asked"].keys()) == (None, None, query.keys())
    assert found["total"] == {"runs": len(found["runs"]), "more": False}
    page = client.get("/p/shop/runs", params=query)
    assert [f"/p/shop/runs/{quote(one['id'], safe='')}" in Tags(page.text).links for one in told] == [True] * len(told)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"since": "soon"}, "since 'soon' is neither a date such as 2026-11-21 nor an age such as 7d or 12h"),
        ({"since": "1d", "until": "2d"}, "since is not before until, so nothing can match"),
        ({"slower_than": "much"}, "slower than 'much' is no duration such as 2s, 500ms or 1min"),
        ({"policy": "agent"}, "policy 'agent' is neither NAME@STEP nor upstream"),
        ({"search": "plum", "after": "evil"}, "after evil: this trajectory does not match, so no page ends there"),
        ({"sort": "reward", "after": "evil"}, "after goes on in the order of time, and not in that of the reward"),
        ({"search": "?!"}, "'?!' has no word to look for"),
    ],
)
def test_a_field_that_is_wrong_is_said_above_the_list(client: httpx.Client, query: Any, words: str):
    told = facts(client, "runs", **query)["wrong"]
    assert told.startswith(words[:20]) and (told == words or query.get("search") == "?!")
    page = client.get("/p/shop/runs", params=query)
    assert (page.status_code, 'role="alert"' in page.text) == (200, True)


def test_what_no_field_takes(client: httpx.Client):
    for query in (
        {"min_reward": "much"},
        {"min_reward": "nan"},
        {"sort": "name"},
        {"status": "x"},
        {"user": "x" * 4_001},
    ):
        assert client.get("/p/shop/runs", params=query).status_code == 422, query
    assert client.get("/p/shop/runs", params={"after": "no-such-run"}).status_code == 404
    assert client.get("/p/shop/runs", params={"user": "\0"}).status_code == 200


def test_pages_go_on_where_they_ended(server: Served, client: httpx.Client, monkeypatch: pytest.MonkeyPatch):
    whole = [one["id"] for one in facts(client, "runs")["runs"]]
    monkeypatch.setattr("art_patch.web.runs.PAGE", 4)
    for query in ({}, {"tool": "lookup"}):
        found, after = list[str](), ""
        for _ in range(10):
            page = facts(client, "runs", after=after, **query)
            found += [one["id"] for one in page["runs"]]
            if (after := page["next"] or "") == "":
                break
        wanted = [one["id"] for one in facts(client, "runs", **query)["runs"]] if query else whole
        assert found[: len(wanted)] == wanted
        assert len(set(found)) == len(found)
    assert whole == [*dict.fromkeys(whole)]


def test_matching_runs_are_counted_up_to_a_limit(client: httpx.Client, monkeypatch: pytest.MonkeyPatch):
    everything = facts(client, "runs")
    monkeypatch.setattr("art_patch.web.runs.PAGE", 3)
    for limit, more in ((len(everything["runs"]) - 1, True), (len(everything["runs"]), False)):
        monkeypatch.setattr("art_patch.web.runs.COUNTED", limit)
        first = facts(client, "runs")
        assert (len(first["runs"]), first["total"]) == (3, {"runs": limit, "more": more})
        assert f"{limit}{'+' if more else ''} in all" in client.get("/p/shop/runs").text
    assert facts(client, "runs", after=first["next"])["total"] is None
    assert "match" in client.get("/p/shop/runs", params={"user": "user-a"}).text


def test_a_filter_without_an_index_looks_so_far_and_says_so(client: httpx.Client, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("art_patch.web.runs.LOOKED_AT", 3)
    query, found = {"model": "gpt-5"}, list[str]()
    for _ in range(10):
        page = facts(client, "runs", **query)
        found += [one["id"] for one in page["runs"]]
        shown = client.get("/p/shop/runs", params=query).text
        assert ("Look at older runs" in shown) == (page["older"] is not None)
        if page["older"] is None:
            break
        query["until"] = page["older"]
    else:
        raise AssertionError("it never ends")
    assert found == ["failed"]
    worst = facts(client, "runs", sort="reward")
    assert worst["looked_since"] is not None


def test_how_many_runs_are_new(server: Served, client: httpx.Client):
    first = facts(client, "runs", user="user-new")
    assert (first["runs"], first["newest_at"] is not None) == ([], True)
    than = facts(client, "runs", name="fruit")["newest_at"]
    assert than == 1_121.5
    asked = {"name": "fruit", "than": than}
    assert facts(client, "new-runs", **asked) == {"asked": {"name": "fruit"}, "than": than, "new": 0, "more": False}
    settings = server.settings["shop"]
    store = open_store(settings.store_url, project="shop")
    write(store, tool_run("b3", "kiwi", "kiwi", started_at=1_125.0, name="fruit"))
    store.close()
    assert facts(client, "new-runs", **asked)["new"] == 1
    page = client.get("/p/shop/new-runs", params=asked)
    assert '<a href="/p/shop/runs?name=fruit">1 run is new or goes on: show</a>' in page.text
    for query in ({"search": "plum"}, {"until": "1d"}, {"sort": "reward"}, {"after": "b1"}):
        assert facts(client, "runs", **query)["newest_at"] is None


def test_an_empty_store_says_what_to_do(server: Served):
    with server.entered("empty") as client:
        assert "Run your agent with <code>art_patch.patch()</code>" in client.get("/p/empty/runs").text


# --- one run ---


def test_one_run_is_told_whole(client: httpx.Client):
    told = facts(client, "runs/fig-0", tokens="true")
    assert [(step["depth"], step["kind"], step["name"], step["call"], step["bar"]) for step in told["steps"]] == [
        (0, "agent", "shop", None, {"x": 0.0, "width": 1000.0, "waited": 0.0}),
        (1, "call", "agent@1", 1, {"x": 0.0, "width": 250.0, "waited": 0.0}),
        (1, "tool", "lookup", None, {"x": 250.0, "width": 250.0, "waited": 0.0}),
        (1, "call", "agent@1", 2, {"x": 500.0, "width": 250.0, "waited": 50.0}),
    ]
    assert told["steps"][2]["values"] == [{"name": "input", "text": '{"item": "fig"}', "left": 0}]
    first, second = told["calls"]
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert [message["role"] for message in second["messages"]] == ["tool"]  # the rest was said before
    assert (first["within"], first["is_main"], second["is_main"]) == (["shop"], False, True)
    (answer,) = first["answers"]
    assert answer["message"]["parts"] == [
        {"kind": "tool_call", "name": "lookup", "id": "call_fig-0", "text": '{"item": "fig"}', "left": 0}
    ]
    assert answer["tokens"] == {
        "rows": [{"text": f"{key} ", "logprob": -0.5, "level": 1} for key in range(3)], "are_ids": True, "left": 0,
    }  # fmt: skip
    assert [(each["policy"], each["advantage"], each["weight"], each["level"]) for each in answer["lessons"]] == [
        ("agent@1", 1.5, 0.5, 3), ("agent@2", 1.5, 0.5, 3),
    ]  # fmt: skip
    known = {"state": "candidate", "group_id": "fig-group", "advantage": 1.5, "weight": 0.5}
    assert told["learned"] == [{"policy": "agent@1", "answers": 2} | known, {"policy": "agent@2", "answers": 1} | known]
    group = told["group"]
    assert (group["id"], group["trained"], [one["id"] for one in group["siblings"]]) == (
        "fig-group", ["agent@1", "agent@2"], ["fig-0", "fig-1"],
    )  # fmt: skip
    assert [each["message"]["parts"][0]["text"] for each in told["corrections"]] == ["30 cents"]
    page = client.get("/p/shop/runs/fig-0", params={"tokens": "true"}).text
    assert ('class="tokens up3"' in page, "learned to say it more" in page) == (True, True)
    for link in ("/p/shop/groups/fig-group", "/p/shop/runs/fig-1", "/p/shop/runs?session=s-fig", "#call-2"):
        assert link in Tags(page).links


def test_what_a_long_run_holds_comes_in_parts(server: Served, client: httpx.Client):
    settings = server.settings["shop"]
    store = open_store(settings.store_url, project="shop")
    said = ({"role": "user", "content": "x" * 30_000},)
    calls = [Call(f"long-{n}", "long", 7_000.0 + n, "m", said, policy=None) for n in range(120)]
    store.write([tool_run("long", "x", "y", started_at=7_000.0).info, *calls])
    store.close()
    told = facts(client, "runs/long")
    assert [call["number"] for call in told["calls"]] == [*range(1, 51)]
    assert (told["all"], told["calls"][0]["messages"][0]["parts"][0]["left"]) == ({"calls": 120, "steps": 120}, 10_000)
    assert [call["number"] for call in facts(client, "runs/long", first=101)["calls"]] == [*range(101, 121)]
    assert [call["number"] for call in facts(client, "runs/long", first=9_999)["calls"]] == [120]
    assert facts(client, "runs/long", full="true")["calls"][0]["messages"][0]["parts"][0]["left"] == 0
    page = client.get("/p/shop/runs/long").text
    assert ("/p/shop/runs/long?first=51" in Tags(page).links, page.count('<details class="long">')) == (True, 1)


def test_a_prompt_of_many_messages_holds_up_neither_its_page_nor_the_list(server: Served, client: httpx.Client):
    settings = server.settings["shop"]
    said = tuple({"role": "user", "content": f"message {number}"} for number in range(6_000))
    calls = [Call(f"many-{n}", "many", 7_500.0 + n, "m", said[: 5_000 + n], policy=None) for n in range(3)]
    with closing(open_store(settings.store_url, project="shop")) as store:
        store.write([tool_run("many", "x", "y", started_at=7_500.0).info, *calls])
        began = time.process_time()
        (found,) = store.browse.summaries(["many"], openings=True)
        assert (found.opening, time.process_time() - began < 1) == ("message 0", True)  # a query for each took 2 s
        tracemalloc.start()
        (run,) = store.read.trajectories(["many"])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert [call.messages for call in run.calls] == [call.messages for call in calls]
        assert peak < 32 << 20  # each of its beginnings took 100 MiB
    first, second, _ = facts(client, "runs/many")["calls"]
    texts = [each["parts"][0]["text"] for each in first["messages"]]
    assert (texts[0], len(texts), first["messages_left"]) == ("message 4800", 200, 4_800)
    assert (len(second["messages"]), second["messages_left"]) == (1, 0)
    assert "4800 messages before" in client.get("/p/shop/runs/many").text
    assert len(facts(client, "runs/many", full="true")["calls"][0]["messages"]) == 5_000


def test_nothing_recorded_is_run_or_hidden(client: httpx.Client):
    assert client.get("/p/shop/runs/no-such-run").status_code == 404
    odd = quote(ODD, safe="")
    paths = ["runs", f"runs?{urlencode({'user': EVIL})}", f"runs?{urlencode({'search': EVIL, 'since': EVIL})}"]
    for key in ("evil", odd):
        paths += [
            f"runs/{key}?tokens=true",
            f"erase-run/{key}",
            f"run-test/{key}",
            f"run-test/{key}?call={key}{quote(EVIL)}1",
        ]
    paths.append(f"new-runs?{urlencode({'user': EVIL, 'than': '0'})}")
    for path in paths:
        page = client.get(f"/p/shop/{path}")
        assert page.status_code == 200, path
        assert Tags(page.text).wrong == [], path
        assert not {"\u202e", "\u2066"} & set("".join(Tags(page.text).shown)), path
        assert len(Tags(page.text).ids) == len(set(Tags(page.text).ids)), "ids are unique"
    page = client.get(f"/p/shop/runs/{odd}").text
    assert page.count("\\u202e") > 30 and "{{7*7}}" in page and "49</textarea>" not in page
    assert facts(client, f"runs/{odd}")["run"]["id"] == ODD


def test_levels_of_colours():
    assert [logprob_level(value) for value in (0.0, -0.5, -1.0, -2.0, -4.0, -9.0, float("-inf"))] == [
        0,
        1,
        2,
        3,
        4,
        5,
        5,
    ]
    assert [advantage_level(value) for value in (0.0, 0.1, 0.7, 2.0, -0.1, -0.7, -2.0)] == [0, 1, 2, 3, -1, -2, -3]


def test_texts_of_tokens(tmp_path: Path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("a é 🙂 b").ids
    texts = token_texts(str(tmp_path), ids)
    assert texts is not None
    assert ("".join(texts), len(texts), texts[2:4]) == ("a é 🙂 b", len(ids), ["", "é"])
    assert token_texts(str(tmp_path / "none"), ids) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    assert token_texts(str(tmp_path), ids) is None
