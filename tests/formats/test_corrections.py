"""Corrections as the answer to learn, as the better one of a pair, and whole, there and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from art_patch.formats import Bundle, Unusable, chat_row, corrected, correction_row, encode, sft_prompt_rows, sft_row
from art_patch.formats.complete import decode
from art_patch.store import Store, open_store
from art_patch.types import Correction, Trajectory
from tests.support.command_line import art_patch
from tests.support.run_samples import SYSTEM, TOOL, asked, fill, plain_run, tool_run

RIGHT = {"role": "assistant", "content": "31 cents"}
CALLED = {
    "role": "assistant",
    "tool_calls": [{"id": "x", "type": "function", "function": {"name": "lookup", "arguments": '{"item": "plum"}'}}],
}


def correction(run: Trajectory, message: dict[str, Any] = RIGHT, at: float = 1.0, **changes: Any) -> Correction:
    return Correction(f"{run.id}-x{at}", run.id, at, "user", message, **changes)


def test_the_corrected_answer_is_what_is_learned():
    run = tool_run("a", "plum", "a fruit")
    right = corrected(run, [correction(run)])
    assert chat_row(right)["messages"] == [*chat_row(run)["messages"][:-1], RIGHT]
    assert sft_row(right)["messages"][-1] == RIGHT
    (row,) = sft_prompt_rows(right)
    assert (row["completion"], len(row["prompt"])) == ([RIGHT], 4)
    assert corrected(run, []) is run


def test_what_followed_the_wrong_answer_is_left_out():
    run = tool_run("a", "plum", "a fruit")
    right = corrected(run, [correction(run, CALLED, call_id="a-1")])
    messages = chat_row(right)["messages"]
    assert (messages[:2], messages[2]["tool_calls"], len(messages)) == (
        [SYSTEM, asked("plum")],
        CALLED["tool_calls"],
        3,
    )
    assert right.calls[0].choices[0].finish_reason == "tool_calls"


def test_the_newest_correction_counts_and_a_cut_answer_is_whole_again():
    run = plain_run("p", "hi", "hel")
    newest = correction(run, RIGHT, at=2.0)
    assert chat_row(corrected(run, [newest, correction(run, CALLED, at=1.0)]))["messages"][-1] == RIGHT


def test_a_pair_of_the_correction_and_what_was_answered():
    run = tool_run("a", "plum", "a fruit", scenario_key="plum")
    row = correction_row(run, [correction(run)])
    assert (row["chosen"], row["rejected"]) == ([RIGHT], [{"role": "assistant", "content": "a fruit"}])
    assert [message["role"] for message in row["prompt"]] == ["system", "user", "assistant", "tool"]
    assert (row["tools"], row["scenario_key"], row["score_chosen"], row["group_id"]) == ([TOOL], "plum", None, None)


def test_why_there_is_no_row():
    run = plain_run("p", "hi", "31 cents")
    with pytest.raises(Unusable, match="what was answered"):
        correction_row(run, [correction(run)])
    with pytest.raises(Unusable, match="is not there"):
        corrected(run, [correction(run, call_id="gone")])


def test_whole_there_and_back():
    run = tool_run("a", "plum", "a fruit")
    bundle = Bundle(run, corrections=(correction(run), correction(run, CALLED, at=2.0, call_id="a-1", comment="no")))
    assert decode(json.loads(json.dumps(encode(bundle)))) == bundle
    assert bundle.records[-2:] == list(bundle.corrections)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    store = open_store(f"sqlite:///{home}/default/store.db")
    fill(store)
    answers = {"b1": correction(tool_run("b1", "pear", "")), "plain": correction(plain_run("plain", ""), CALLED)}
    store.write(list(answers.values()))
    store.write([Correction("on-nothing", "failed", 1.0, "user", RIGHT)])
    store.close()
    return home


def exported(home: Path, tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    target = tmp_path / "out.jsonl"
    result = art_patch("export", target, "--force", *options, home=home)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in target.read_text().splitlines()]


def test_the_command_exports_them(home: Path, tmp_path: Path):
    last = [row["messages"][-1] for row in exported(home, tmp_path, "--format", "chat")]
    assert last.count(RIGHT) == 2  # of `failed`, which had no answer at all, too
    pairs = [row for row in exported(home, tmp_path, "--format", "preference") if row["score_chosen"] is None]
    assert [pair["rejected"][0]["content"] for pair in pairs] == ["see you", "pear 1"]
    (line,) = [row for row in exported(home, tmp_path, "--format", "trajectories") if "corrections" in row][-1:]
    assert line["corrections"][0]["message"] == RIGHT
    imported = art_patch("import", tmp_path / "out.jsonl", "--project", "copy", home=home)
    assert imported.returncode == 0, imported.stderr
    copy: Store = open_store(f"sqlite:///{home}/copy/store.db")
    assert copy.evidence.corrections(["b1"])["b1"][0].message == RIGHT
    copy.close()


def test_the_command_shows_them(home: Path):
    shown = art_patch("trajectories", "show", "b1", home=home).stdout
    assert "it should have been" in shown
    assert "31 cents" in shown
    whole = json.loads(art_patch("trajectories", "show", "b1", "--json", home=home).stdout)
    assert whole["corrections"][0]["message"] == RIGHT


def test_erase_counts_them(home: Path):
    result = art_patch("erase", "--trajectory", "plain", "--dry-run", home=home)
    assert "1 correction" in result.stdout
