"""`art-patch groups` on a store that has all kinds of runs."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from art_patch._lib.ids import new_id
from art_patch.store import Store, open_store
from art_patch.types import Call, Choice, Group, Judgement, Score, SpanInfo, Trajectory, TrajectoryInfo
from tests.support.command_line import art_patch, says
from tests.support.embeddings import serve_embeddings

PROMPTS = ["price of 3 plums", "3 plums price", "price of 4 plums"]


def run(text: str, *, spans: int = 0, system: str = "", at: float = 1_000.0, **about: str) -> Trajectory:
    key = new_id()
    answer = (Choice(0, {"role": "assistant", "content": "yes"}, "stop"),)
    inside = tuple(SpanInfo(new_id(), key, "try", at + n) for n in range(spans))
    calls = tuple(
        Call(
            new_id(),
            key,
            at + n,
            "m",
            ({"role": "system", "content": system}, {"role": "user", "content": text}),
            answer,
            span_id=span,
            policy="agent@0",
        )
        for n, span in enumerate([span.id for span in inside] or [None])
    )
    return Trajectory(TrajectoryInfo(key, at, "explicit", **about), calls, spans=inside)


def keep(store: Store, *runs: Trajectory) -> None:
    store.write([record for each in runs for record in (each.info, *each.spans, *each.calls)])


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Twelve runs: 2 + 3 in groups, of which one is dead; 2 near-duplicates, 1 with attempts, 1 upstream, 3 alone."""
    store = open_store(f"sqlite:///{tmp_path}/default/store.db")
    told = [run("x", group_key="k") for _ in range(2)]
    same = [run("y") for _ in range(3)]
    keep(store, *told, *same)
    store.ledger.add_groups([Group("g1", "group:k", "group_key", tuple(told))], state="trained")
    store.ledger.add_groups([Group("g2", "task:y", "same_task", tuple(same), held_out=True)], state="dead")
    keep(store, *map(run, PROMPTS), run("try it", spans=3), run("alone"), run("lonely"))
    upstream = run("what is up")
    store.write(
        [
            upstream.info,
            Call(new_id(), upstream.id, 1_000.0, "m", upstream.calls[0].messages, untrainable="answered by upstream"),
        ]
    )
    store.close()
    return tmp_path


def test_the_report_as_json(home: Path):
    told = json.loads(art_patch("groups", "--json", "--min-size", "2", home=home).stdout)
    assert told == {
        "runs": 12,
        "in_groups": 5,
        "would_be_grouped": 3,
        "groupable_share": 8 / 12,
        "looked_at": 7,
        "ways": {
            "group_key": {"groups": 1, "runs": 2, "would_be": 0},
            "sibling_spans": {"groups": 0, "runs": 0, "would_be": 1},
            "same_task": {"groups": 1, "runs": 3, "would_be": 0},
            "near_duplicate": {"groups": 0, "runs": 0, "would_be": 2},
        },
        "left": {"waits for a sibling": 3, "answered by upstream": 1},
        "not_learned_from": {},
        "embeddings": None,
        "groups": 2,
        "states": {"trained": 1, "dead": 1},
        "held_out": 1,
        "sizes": {"2": 1, "3": 1},
        "dead_share": 0.5,
    }


def test_the_report_reads_well_and_changes_nothing(home: Path):
    first = art_patch("groups", "--min-size", "2", home=home, COLUMNS="80")
    assert first.returncode == 0, first.stderr
    assert max(map(len, first.stdout.splitlines())) <= 80
    for words in ("67% of 12 runs", "1 trained", "1 dead", "1 held out", "50% of those that were judged", "1 of 3",
                  "near_duplicate", "3 left: waits for a sibling", "1 left: answered by upstream"):  # fmt: skip
        assert words in first.stdout, words
    assert art_patch("groups", "--min-size", "2", home=home, COLUMNS="80").stdout == first.stdout


def test_a_share_is_that_of_the_runs_that_were_looked_at(tmp_path: Path):
    store = open_store(f"sqlite:///{tmp_path}/default/store.db")
    keep(store, *(run("what is it", at=time.time()) for _ in range(3)))
    store.close()
    told = json.loads(art_patch("groups", "--json", home=tmp_path).stdout)
    assert (told["runs"], told["looked_at"], told["groupable_share"]) == (3, 0, None)
    shown = art_patch("groups", home=tmp_path).stdout
    assert "not known yet; 3 were not looked at: they may still go on" in shown
    options = ("--settle-s", "0", "--min-size", "2", "--limit", "2")
    told = json.loads(art_patch("groups", "--json", *options, home=tmp_path).stdout)
    assert (told["looked_at"], told["groupable_share"]) == (2, 1.0)


def test_copies_count_for_the_run_that_they_were_taken_from(home: Path):
    store = open_store(f"sqlite:///{home}/default/store.db")
    source = run("best of two")
    copies = [Trajectory(TrajectoryInfo(new_id(), 1_000.0, "span"), ()) for _ in range(2)]
    keep(store, source, *copies)
    store.ledger.add_groups([Group(new_id(), "run", "single", (source,))], state="in spans")
    store.ledger.add_groups([Group(new_id(), "task:x/try", "sibling_spans", tuple(copies))])
    store.close()
    told = json.loads(art_patch("groups", "--json", home=home).stdout)
    assert (told["runs"], told["in_groups"]) == (13, 6)
    assert told["ways"]["sibling_spans"] == {"groups": 1, "runs": 1, "would_be": 0}
    assert told["states"] == {"trained": 1, "dead": 1, "formed": 1}


def test_nothing_to_report(tmp_path: Path):
    says(art_patch("groups", home=tmp_path), 19, "there is no store")
    open_store(f"sqlite:///{tmp_path}/default/store.db").close()
    assert "no trajectories are recorded yet" in art_patch("groups", home=tmp_path).stdout
    told = json.loads(art_patch("groups", "--json", home=tmp_path).stdout)
    assert (told["runs"], told["groupable_share"], told["dead_share"]) == (0, None, None)


@pytest.fixture
def worded(tmp_path: Path) -> Path:
    """Four runs that ask for one thing, in three wordings and under two system prompts."""
    store = open_store(f"sqlite:///{tmp_path}/default/store.db")
    keep(store, run("I want a refund"), run("give me my money back"), run("money back, now"))
    keep(store, run("I want a refund", system="be brief"))
    store.close()
    return tmp_path


def would_be(home: Path, **environment: str) -> dict[str, object]:
    told = art_patch("groups", "--json", "--min-size", "2", home=home, **environment)
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)


@pytest.mark.slow
def test_settings_say_what_else_is_one_task(worded: Path):
    assert would_be(worded)["would_be_grouped"] == 0
    assert would_be(worded, ART_PATCH_GROUP_ACROSS="1")["would_be_grouped"] == 2
    with serve_embeddings() as (url, seen):
        model = {"ART_PATCH_EMBEDDINGS": "m", "ART_PATCH_EMBEDDINGS_BASE_URL": url}
        told = would_be(worded, **model, ART_PATCH_EMBEDDINGS_API_KEY="key")
        assert (told["would_be_grouped"], told["embeddings"]) == (3, None)
        assert would_be(worded, **model, ART_PATCH_GROUP_ACROSS="1")["would_be_grouped"] == 4
    assert [key for key, _ in seen] == ["Bearer key", "Bearer none"]
    told = would_be(worded, **model)
    assert told["would_be_grouped"] == 0
    assert told["embeddings"] == f"m at {url} gave no embeddings: Connection error."
    shown = art_patch("groups", home=worded, COLUMNS="200", **model)
    assert f"grouped by words alone: {told['embeddings']}" in shown.stdout


@pytest.mark.parametrize("command", ["groups", "retrain", "score"])
def test_a_model_without_an_address_is_refused(command: str, worded: Path):
    judge = {"ART_PATCH_JUDGE": "openai/x"}
    told = art_patch(command, home=worded, ART_PATCH_EMBEDDINGS="m", **judge)
    says(told, 2, "embeddings names m and no address", "ART_PATCH_EMBEDDINGS_BASE_URL")


@pytest.fixture
def quarantined(home: Path) -> Path:
    """A group whose scores are not believed."""
    store = open_store(f"sqlite:///{home}/default/store.db")
    runs = [run("SECRET plan"), run("z")]
    keep(store, *runs)
    store.ledger.add_groups([Group("odd-1", "task:z", "same_task", tuple(runs))], state="scored")
    store.ledger.set_groups(["odd-1"], "quarantined", reason="the judge prefers the planted answer")
    by = {"group_id": "odd-1", "rubric": "abc", "judge": "openai/judge"}
    words = ("good [red]plan[/]", "too long, " * 20)
    store.write([Score(f"s{n}", each.id, "ruler", n / 4, "ruler", 5.0, words[n], **by) for n, each in enumerate(runs)])
    store.ledger.add_judgement(
        Judgement("j", "odd-1", 5.0, "openai/judge", "abc", "score", "failed", "it answers prose")
    )
    store.close()
    return home


def test_a_group_says_what_the_judge_said_and_why_it_is_put_aside(quarantined: Path):
    told = json.loads(art_patch("groups", "show", "odd", "--json", home=quarantined).stdout)
    assert (told["id"], told["state"], told["reason"]) == (
        "odd-1",
        "quarantined",
        "the judge prefers the planted answer",
    )
    assert (told["held_out"], told["trained"]) == (False, [])
    assert [(one["reward"], one["scores"][0]["comment"][:4]) for one in told["siblings"]] == [
        (0.0, "good"), (0.25, "too "),
    ]  # fmt: skip
    assert told["judgements"][0]["reason"] == "it answers prose"
    shown = art_patch("groups", "show", "odd-1", home=quarantined, COLUMNS="80").stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert all(one["id"] in shown for one in told["siblings"])
    flat = " ".join(shown.split())
    for words in (
        "quarantined: its scores are not believed", "the judge prefers the planted answer", "held out no",
        "ruler 0.00 (ruler): good [red]plan[/]", "for score: failed: it answers prose", "reward 0.25", "no policy",
    ):  # fmt: skip
        assert words in flat


def test_a_held_out_group_and_groups_that_are_not_there(quarantined: Path):
    shown = " ".join(art_patch("groups", "show", "g2", home=quarantined).stdout.split())
    assert "held out yes: for the gate only" in shown
    assert "dead: it teaches nothing" in shown
    assert "no reward, answered by agent@0, 1 call: y" in shown
    says(art_patch("groups", "show", "nobody", home=quarantined), 19, "nobody")
    says(art_patch("groups", "show", "", home=quarantined), 19, "no group")
    says(art_patch("groups", "show", "g", home=quarantined), 2, "several ids", "g1, g2")
    says(art_patch("groups", "--limit", "3", "show", "g1", home=quarantined), 2, "go behind")
