"""What people say beside what the judge says, on the command line."""

from __future__ import annotations

import json
from pathlib import Path

from art_patch.store import open_store
from art_patch.types import Score
from tests.support.command_line import art_patch, says
from tests.support.run_samples import fill


def test_status_says_where_people_and_the_judge_differ(tmp_path: Path):
    store = open_store(f"sqlite:///{tmp_path}/default/store.db")
    fill(store)
    assert json.loads(art_patch("status", "--json", home=tmp_path).stdout)["disagreement"] == {
        "pairs": 0, "against": 0, "tied": 0, "groups": 0, "share": None,
    }  # fmt: skip
    assert "sibling pairs" not in art_patch("status", home=tmp_path).stdout
    for run, thumbs in (("b0", 0.0), ("b1", 1.0), ("b2", 1.0)):  # the judge gave 0.8, 0.1, 0.95
        store.write([Score(f"{run}-thumbs", run, "thumbs", thumbs, "user", 2.0)])
    store.close()
    assert json.loads(art_patch("status", "--json", home=tmp_path).stdout)["disagreement"] == {
        "pairs": 2, "against": 1, "tied": 0, "groups": 1, "share": 0.5,
    }  # fmt: skip
    assert (
        "the judge orders 1 of 2 sibling pairs (50%) the other way round" in art_patch("status", home=tmp_path).stdout
    )


def test_an_export_follows_the_declared_reward(tmp_path: Path):
    store = open_store(f"sqlite:///{tmp_path}/default/store.db")
    fill(store)
    store.close()
    target = tmp_path / "pairs.jsonl"
    result = art_patch("export", target, "--format", "preference", home=tmp_path, ART_PATCH_REWARD="criteria")
    assert result.returncode == 0, result.stderr
    (row,) = [json.loads(line) for line in target.read_text().splitlines()]  # group-a was given rewards, and no judge
    assert (row["group_id"], row["score_chosen"] > row["score_rejected"]) == ("group-b", True)
    nowhere = art_patch("export", target, "--format", "preference", home=tmp_path, ART_PATCH_REWARD="nowhere:best")
    says(nowhere, 2, "no module 'nowhere'")
