"""What a cycle notes while it runs, and what is read of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from art_patch.pipeline import RUNNING, read_running
from art_patch.pipeline.running_cycle import noting


def test_it_tells_the_stages_while_it_runs_and_is_gone_then(tmp_path: Path):
    seen: list[tuple[str, int, int, str]] = []
    with noting(tmp_path, lambda *step: seen.append(step), who="cron", began_at=5.0) as progress:
        running = read_running(tmp_path)
        assert running == {"who": "cron", "began_at": 5.0, "stages": {}}
        progress("score", 0, 3, "a group")
        progress("score", 3, 3)
        progress("train", 1, 8)
        running = read_running(tmp_path)
        assert running is not None
        stages = running["stages"]
        assert {name: (its["done"], its["total"]) for name, its in stages.items()} == {"score": (3, 3), "train": (1, 8)}
        assert "a group" not in (tmp_path / RUNNING).read_text()  # notes may quote what was recorded
    assert seen == [("score", 0, 3, "a group"), ("score", 3, 3, ""), ("train", 1, 8, "")]
    assert read_running(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_cycle_that_fails_leaves_nothing(tmp_path: Path):
    with pytest.raises(ValueError, match="lost"), noting(tmp_path, lambda *_: None, who="cron", began_at=5.0):
        raise ValueError("lost")
    assert read_running(tmp_path) is None


def test_what_a_killed_cycle_left_is_no_running_one(tmp_path: Path):
    with noting(tmp_path, lambda *_: None, who="cron", began_at=5.0) as progress:
        progress("score", 1, 3)
        left = (tmp_path / RUNNING).read_text()
    facts = json.loads(left)
    facts["owner"]["pid"] += 1_000_000
    (tmp_path / RUNNING).write_text(json.dumps(facts))
    assert read_running(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"owner": 1}', '{"owner": {"pid": 1}}', "\x00"])
def test_a_file_that_is_no_note_is_none(tmp_path: Path, text: str):
    (tmp_path / RUNNING).write_text(text)
    assert read_running(tmp_path) is None


def test_a_directory_that_cannot_be_written_fails_no_cycle(tmp_path: Path):
    with noting(tmp_path / "gone", lambda *_: None, who="cron", began_at=5.0) as progress:
        progress("score", 1, 3)
