"""The steps of training, read back by TensorBoard itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from tensorboard.util.tensor_util import make_ndarray
from typer.testing import CliRunner

from art_patch.cli.app import app
from art_patch.errors import TrackerError
from tests.trackers.policies import filled, run


def send(home: Path, directory: Path, *options: str) -> dict[str, Any]:
    words = ["send", "tensorboard", str(directory), "--project", "shop", "--home", str(home), "--json", *options]
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return json.loads(result.stdout)


def read(directory: Path) -> dict[str, dict[str, list[tuple[int, float, float]]]]:
    """Step, value and time of every scalar, by run and tag."""
    events = EventMultiplexer().AddRunsFromDirectory(str(directory)).Reload()
    return {
        run: {
            tag: [(e.step, float(make_ndarray(e.tensor_proto)), e.wall_time) for e in events.Tensors(run, tag)]
            for tag in tags["tensors"]
        }
        for run, tags in events.Runs().items()
    }


WHOLE = {
    "agent": {
        "reward/mean": [(0, 0.25, 50.0), (1, 1.0, 60.0)],
        "reward/runs": [(0, 2.0, 50.0), (1, 1.0, 60.0)],
        "gate/lower_bound": [(1, 0.0625, 60.0)],
        "gate/scenarios": [(1, 9.0, 60.0)],
        "gate/won": [(1, 1.0, 60.0)],
        "train/kl_nats": [(1, 0.125, 60.0)],
        "train/loss": [(1, 0.375, 60.0)],
    },
    "agent@1": {
        "update/epoch": [(0, 0.0, 60.0), (1, 1.0, 60.0)],
        "update/loss": [(0, 0.5, 60.0), (1, 0.25, 60.0)],
        "update/kl_nats": [(0, 0.0, 60.0)],
    },
}


def test_every_figure_is_read_back_and_a_second_time_adds_nothing(tmp_path: Path):
    store, board = filled(tmp_path), tmp_path / "board"
    target = f"tensorboard {board}"
    assert send(tmp_path, board) == {
        "target": target, "episodes": 0, "steps": 2, "written": 10, "already_there": 0,
    }  # fmt: skip
    assert read(board) == WHOLE
    files = sorted(board.rglob("events*"))
    assert send(tmp_path, board)["written"] == 0
    assert sorted(board.rglob("events*")) == files
    run(store, "d", "agent@1", 0.0)
    store.close()
    assert send(tmp_path, board)["written"] == 2
    found = read(board)["agent"]
    assert found["reward/mean"] == [(0, 0.25, 50.0), (1, 1.0, 60.0), (1, 0.5, 60.0)]
    assert send(tmp_path, tmp_path / "other")["written"] == 10


def test_what_was_lost_is_sent_again(tmp_path: Path):
    filled(tmp_path).close()
    send(tmp_path, tmp_path / "board")
    for file in (tmp_path / "board").rglob("events*"):
        file.unlink()
    assert send(tmp_path, tmp_path / "board", "--again")["written"] == 10
    assert read(tmp_path / "board") == WHOLE


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    filled(tmp_path).close()
    (tmp_path / "board").write_text("a file")
    with pytest.raises(TrackerError, match=r"board cannot be written.*choose another directory"):
        send(tmp_path, tmp_path / "board")
