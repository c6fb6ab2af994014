"""`art-patch consent`, and what other commands say and do about runs that may not be learned from."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from art_patch.cli.app import app
from art_patch.errors import ConfigError
from art_patch.store import open_store
from art_patch.types import Call, Choice, Correction, Group, Policy, Score, TrajectoryInfo
from tests.support.command_line import warned


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Users u0 and u1 with two runs each, in groups of both, and a run that may not be learned from."""
    store, now = open_store(f"sqlite:///{tmp_path}/default/store.db"), time.time()
    for key, user, learn in (
        ("a0", "u0", True),
        ("a1", "u1", True),
        ("b0", "u0", True),
        ("b1", "u1", True),
        ("no", None, False),
    ):
        said = ({"role": "user", "content": f"hi {key[0]}"},)
        answer = Choice(0, {"role": "assistant", "content": f"I am {key}"}, "stop")
        about = TrajectoryInfo(key, now, "explicit", user_id=user, learn=learn)
        store.write([about, Call(f"{key}-c", key, now, "gpt-5", said, (answer,))])
        store.write([Score(f"{key}-s", key, "reward", float(user == "u0"), "user", now)])
    store.write([Correction("right", "b1", now, "user", {"role": "assistant", "content": "better"})])
    for group in "ab":
        members = store.read.trajectories([f"{group}0", f"{group}1"])
        store.ledger.add_groups([Group(f"g-{group}", f"task:{group}", "same_task", members)], state="scored", now=now)
    store.ledger.add_base("agent@0", "/base", "ff", who="test")
    policy = Policy("agent@1", "/base", "ff", "candidate", now, path="/a/agent@1", parent="agent@0")
    store.ledger.add_candidate(policy, trained_on=["g-a"], who="test")
    store.close()
    return tmp_path


def art_patch(home: Path, *arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments, "--home", str(home)], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def facts(home: Path, *arguments: str) -> dict[str, Any]:
    return json.loads(art_patch(home, *arguments, "--json"))


def test_a_user_withdraws_and_comes_back(home: Path):
    said = art_patch(home, "consent", "--user", "u1", "--withdraw").splitlines()
    assert said[0] == "u1: 2 runs of before, and all that follow, are recorded for operation only"
    assert said[1].startswith("agent@1 learned from some of them; `art-patch erase --dry-run`")
    assert art_patch(home, "consent", "--user", "u1", "--withdraw").startswith("u1 had withdrawn before")
    listed = art_patch(home, "consent").splitlines()
    assert listed[0].startswith("u1 withdrew ")
    assert listed[1:] == [
        "1 runs not learned from: the app said that nothing may be learned from it",
        "2 runs not learned from: its user withdrew",
    ]
    assert "2 runs not learned from: its user withdrew" in art_patch(home, "status")
    assert "2 not learned from: its user withdrew" in art_patch(home, "groups")
    assert facts(home, "groups")["not_learned_from"]["its user withdrew"] == 2
    back = facts(home, "consent", "--user", "u1", "--give")
    assert (back["changed"], back["learns"], back["runs"]) == (True, True, 2)
    assert art_patch(home, "consent", "--user", "u1", "--give").strip() == "u1 had not withdrawn, so nothing changed"
    assert facts(home, "consent")["withdrawn"] == {}


@pytest.mark.parametrize(
    "options", [("--user", "u1"), ("--withdraw",), ("--user", "u1", "--withdraw", "--give"), ("--user", "", "--give")]
)
def test_half_a_word_changes_nothing(home: Path, options: tuple[str, ...]):
    with pytest.raises(ConfigError):
        art_patch(home, "consent", *options)
    assert facts(home, "consent")["withdrawn"] == {}


@pytest.mark.parametrize("form", ["chat", "sft", "preference", "grpo"])
def test_files_to_train_on_hold_none_of_them(home: Path, form: str, tmp_path: Path):
    target = tmp_path / f"{form}.jsonl"
    before = facts(home, "export", str(target), "--format", form, "--force")
    if form != "preference":  # `no` is in no group, and nobody corrected it
        assert before["skipped"]["it may not be learned from"] == 1
    assert "I am no" not in target.read_text()
    facts(home, "consent", "--user", "u1", "--withdraw")
    after = facts(home, "export", str(target), "--format", form, "--force")
    assert after["skipped"]["it may not be learned from"] >= 2
    if form == "preference":
        assert (before["rows"], after["rows"]) == (3, 0)
    else:
        assert "I am a1" not in target.read_text() and "better" not in target.read_text()


def test_a_file_of_whole_runs_keeps_all_and_the_mark(home: Path, tmp_path: Path):
    target = tmp_path / "all.jsonl"
    assert facts(home, "export", str(target), "--format", "trajectories")["rows"] == 5
    art_patch(home, "import", str(target), "--project", "copy")
    copy = open_store(f"sqlite:///{home}/copy/store.db")
    marks = {run.id: run.info.learn for run in copy.read.recent()}
    copy.close()
    assert marks == {"a0": True, "a1": True, "b0": True, "b1": True, "no": False}


def test_the_first_retrain_says_what_leaves_and_what_is_learned_and_later_ones_do_not(home: Path):
    judge = ("--judge", "openai/some-judge", "--judge-base-url", "http://user:secret@judge.example:9/v1")
    first = retrain(home, *judge, "--imitate-models", "qwen*,gpt-x")
    lines = first.stdout.splitlines()[:4]
    assert lines[0].startswith("project default: calls of its apps are recorded with their texts in sqlite:///")
    assert lines[1].startswith(
        "judging sends recorded prompts, answers and tool results to openai/some-judge at judge.example:9; "
    )
    assert lines[2] == "training on the provider's answers is on for qwen*, gpt-x (ART_PATCH_IMITATE_MODELS)"
    assert lines[3].startswith("users opt out by art.trajectory(learn=False)")
    assert "secret" not in first.stdout
    assert "judging sends" not in retrain(home, *judge).stdout


def test_with_a_teacher_the_first_words_name_it(home: Path):
    first = retrain(home, "--teacher", "big", "--teacher-base-url", "http://user:secret@teacher.example:9/v1")
    lines = first.stdout.splitlines()
    assert lines[1] == (
        "learning sends the token ids of recorded prompts and answers to the teacher big at teacher.example:9"
    )
    assert "judging" not in first.stdout and "secret" not in first.stdout


def test_with_json_the_first_words_are_on_stderr(home: Path):
    first = retrain(home, "--json")
    lines = warned(first.stderr).splitlines()
    assert lines[1].endswith("the judge that you name; `art-patch score --dry-run` shows how much")
    assert lines[2] == "training on the provider's answers is off (ART_PATCH_IMITATE_MODELS)"
    assert "judging sends" not in first.stdout
    assert "judging sends" not in retrain(home, "--json").stderr
    store = open_store(f"sqlite:///{home}/default/store.db")
    assert (store.consent.note_start("retrain"), store.consent.note_start("serve")) == (False, True)
    store.close()


def retrain(home: Path, *arguments: str) -> Any:
    """It ends soon, because no policy serves; but it began."""
    return CliRunner().invoke(app, ["retrain", *arguments, "--home", str(home)], env={"COLUMNS": "400"})
