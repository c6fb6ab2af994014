"""`art-patch days` and `art-patch scenarios`: quality and cost by day, by promotion and by task."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from art_patch.store import open_store
from art_patch.types import Call, Choice, Group, Judgement, Policy, Score, Trajectory, TrajectoryInfo
from tests.support.command_line import art_patch

NOON = datetime.now().replace(hour=0, minute=0, second=1).timestamp() - 43_200.0  # yesterday


def run(key: str, policy: str | None, reward: float, at: float = NOON, fallback: str | None = None) -> Trajectory:
    choice = Choice(0, {"role": "assistant", "content": "yes"}, "stop")
    call = Call(
        f"{key}-call", key, at, "m", ({"role": "user", "content": "SECRET"},), (choice,), policy=policy,
        fallback=fallback, prompt_tokens=1_000, completion_tokens=200,
    )  # fmt: skip
    score = Score(f"{key}-score", key, "reward", reward, "user", at)
    return Trajectory(TrajectoryInfo(key, at), (call,), scores=(score,))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Yesterday `agent@1` became champion; `agent@2` is a candidate that won one of two tasks."""
    store = open_store(f"sqlite:///{tmp_path}/default/store.db")
    runs = [
        run("a1", "agent@1", 0.5), run("a2", "agent@2", 1.0), run("b1", "agent@1", 0.5), run("b2", "agent@2", 0.25),
        run("up", None, 0.75, fallback="engine down"), run("old", None, 0.5, at=NOON - 40 * 86_400),
    ]  # fmt: skip
    for each in runs:
        store.write([each.info, *each.calls, *each.scores])
    groups = [Group("g1", "plums", "same_task", tuple(runs[:2])), Group("g2", "pears", "same_task", tuple(runs[2:4]))]
    store.ledger.add_groups(groups[:1], now=NOON)
    store.ledger.add_groups(groups[1:], now=NOON)
    for number, (usd, calls) in enumerate(((0.5, 3), (None, 2), (0.25, 1))):
        times = NOON - 2_000 if number < 2 else NOON + 2_000
        store.ledger.add_judgement(
            Judgement(f"j{number}", "g1", times, "openai/judge", "r", "score", "valid", calls=calls,
                      prompt_tokens=10, completion_tokens=1, cost_usd=usd)
        )  # fmt: skip
    base = store.ledger.add_base("agent@0", "/base", "ff", who="ada", now=NOON - 9_000)
    for step in (1, 2):
        metrics = {"train": {"took_s": 60.0 * step}}
        made = Policy(
            f"agent@{step}", base.base, "ff", "candidate", NOON - 1_000 * (3 - 2 * step), "/a", "agent@0", metrics
        )
        store.ledger.add_candidate(made, trained_on=[f"g{step}"], who="ada")
    store.ledger.move("agent@1", "champion", who="ada", reason="won", now=NOON)
    store.close()
    return tmp_path


def test_days_tell_who_answered_how_well_and_what_was_spent(home: Path):
    told = json.loads(art_patch("days", "--days", "3", "--json", home=home).stdout)
    assert len(told["days"]) == 3
    days = {each["day"]: each for each in told["days"]}
    day = days[f"{datetime.fromtimestamp(NOON):%Y-%m-%d}"]
    assert [(each["policy"], each["runs"], each["reward"]) for each in day["answered"]] == [
        (None, 1, 0.75), ("agent@1", 2, 0.5), ("agent@2", 2, 0.625),
    ]  # fmt: skip
    spent = (
        "fell_back",
        "copies",
        "prompt_tokens",
        "completion_tokens",
        "judge_calls",
        "judge_tokens",
        "judge_usd",
        "judge_unpriced",
    )
    assert [day[name] for name in spent] == [1, 0, 1_000, 200, 6, 33, 0.75, 2]
    (promotion,) = told["promotions"]
    assert {**promotion, "at": 0} == {
        "policy": "agent@1", "at": 0, "since": None, "judge_usd": 0.5, "judge_unpriced": 2, "updates": 1,
        "update_s": 60.0, "updates_untimed": 0,
    }  # fmt: skip


def test_days_read_well_in_80_columns(home: Path):
    page = art_patch("days", home=home, COLUMNS="80").stdout
    assert max(map(len, page.splitlines())) <= 80
    flat = " ".join(page.split())
    for words in (
        "upstream 1 0.75 1 1.2k",
        "agent@1 2 0.50",
        "unknown price",
        "agent@1 became champion: 1 update of 60.0 s",
    ):
        assert words in flat, page
    assert "SECRET" not in page
    empty = art_patch("days", "--days", "1", home=home).stdout
    assert empty.startswith("nothing was recorded or judged in these days")


def test_scenarios_tell_what_the_newest_candidate_won(home: Path):
    told = json.loads(art_patch("scenarios", "--json", home=home).stdout)
    assert (told["held"], told["candidate"], told["champion"]) == (2, "agent@2", "agent@1")
    found = {each["key"]: (each["runs"], each["reward"], each["outcome"]) for each in told["scenarios"]}
    assert found == {"plums": (2, 0.75, "won"), "pears": (2, 0.375, "lost")}
    page = art_patch("scenarios", home=home, COLUMNS="80").stdout
    assert max(map(len, page.splitlines())) <= 80
    assert "2 0.75 1.00 0.50 won plums" in " ".join(page.split())
    assert "2 of 2; candidate agent@2, champion agent@1" in page


def test_scenarios_are_told_apart_by_their_text_and_an_untested_import_is_not_the_candidate(home: Path):
    key, words = "task:d309a99bf96eaef1a867543da96b74a5", "what do three [b]plums[/b] cost, if I buy them today?"
    store = open_store(f"sqlite:///{home}/default/store.db")
    asked = run("c1", "agent@2", 1.0)
    (call,) = asked.calls
    asked = replace(asked, calls=(replace(call, messages=({"role": "user", "content": words},)),))
    store.write([asked.info, *asked.calls, *asked.scores])
    store.ledger.add_groups([Group("g3", key, "same_task", (asked,))], now=NOON)
    for step in (3, 4):
        brought = Policy(f"agent@{step}", "/base", "ff", "candidate", NOON + step * 9_000, "/a", None, {"imported": {}})
        store.ledger.add_candidate(brought, trained_on=[], who="ada")
    store.close()
    told = json.loads(art_patch("scenarios", "--json", home=home).stdout)
    assert (told["candidate"], told["not_answering"]) == ("agent@2", ["agent@4", "agent@3"])
    assert {each["key"]: each["opening"] for each in told["scenarios"]} == {
        "plums": "SECRET", "pears": "SECRET", key: words
    }  # fmt: skip
    page = art_patch("scenarios", home=home, COLUMNS="80").stdout
    lines = [" ".join(line.split()) for line in page.splitlines()]
    assert lines[0] == "runs reward candidate champion outcome held out task"
    assert any(line.startswith("1 1.00 1.00 what do three [b]plum") and line.endswith("…") for line in lines)
    assert lines[-1].endswith("champion agent@1; newer and without an answer to apps: agent@4, agent@3")
    assert key not in page and max(map(len, page.splitlines()[:-1])) <= 80
