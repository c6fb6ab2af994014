"""Models that are only asked, and the processes below a script."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import art_patch as art
from art_patch.rollouts.processes import ScriptChild
from art_patch.store import open_store

USER: Any = {"role": "user", "content": "hi"}


class Turns(BaseModel):
    most: int = 3


def prompted(**more: Any) -> art.Model[Turns]:
    return art.Model(name="big", project="compare", config=Turns(), inference_base_url="http://127.0.0.1:9/v1", **more)


def test_a_prompted_model_is_asked_by_its_own_name_and_its_rollouts_are_kept_apart(tmp_path: Path):
    model = prompted(inference_model_name="openai/big")
    assert (model.get_inference_name(), model.trainable, model.config.most) == ("openai/big", False, 3)
    run = art.Trajectory(messages_and_choices=[USER, {"role": "assistant", "content": "yo"}], reward=0.5)

    async def log() -> None:
        with art.LocalBackend(path=tmp_path) as backend:
            await model.register(backend)
            await model.log([run, ValueError("no")], split="test", metrics={"extra": 2.0})

        with pytest.raises(art.ConfigError, match="not registered"):  # the backend was closed
            await model.log([])

    asyncio.run(log())
    store = open_store(f"sqlite:///{tmp_path}/compare/store.db")
    (group,) = store.read.groups(state="spent")
    assert (group.held_out, store.ledger.champion()) == (True, None)
    assert group.trajectories[0].info.metadata == {"split": "test", "step": 0, "model": "big"}
    store.close()
    (line,) = (tmp_path / "compare" / "history.jsonl").read_text().splitlines()
    assert json.loads(line) | {"at": 0} == {
        "step": 0, "at": 0, "model": "big", "test/reward": 0.5, "test/exception_rate": 0.5, "test/extra": 2.0,
    }  # fmt: skip


def test_what_a_model_cannot_do_is_said():
    with pytest.raises(art.ConfigError, match="no steps"):
        prompted().get_inference_name(step=1)
    with pytest.raises(art.ConfigError, match="inference_base_url"):
        art.Model(name="big", project="compare").openai_client()
    with pytest.raises(art.ConfigError, match="not registered"):
        asyncio.run(prompted().log([]))
    with pytest.raises(ValueError, match="Extra inputs"):
        art.TrainableModel(name="a", project="b", base_model="c", lora_rank=4)
    learns = art.TrainableModel(name="a", project="b", base_model="c", config=Turns())
    copy = learns.model_copy(deep=True)
    copy.config.most = 9
    assert (learns.config.most, learns.get_inference_name(step=2)) == (3, "a@2")
    with pytest.raises(art.ConfigError, match="no backend 'cloud'"):
        asyncio.run(art.start(learns, backend="cloud").__aenter__())  # type: ignore[arg-type]


def test_a_child_says_why_it_ended(tmp_path: Path):
    child = ScriptChild("json.tool", [str(tmp_path / "nothing")], {}, tmp_path / "logs" / "child.log")
    assert child.read() is None
    child.stop()
    child.stop()
    assert child.poll() is not None
    assert "No such file" in child.last_words()


def test_a_child_that_prints_is_not_taken_at_its_word(tmp_path: Path):
    (tmp_path / "lines.json").write_text('{"a": 1}')
    child = ScriptChild("json.tool", ["--json-lines", "--compact", str(tmp_path / "lines.json")], {}, tmp_path / "log")
    assert (child.read(), child.read()) == ({"a": 1}, None)
    child.stop()
    quiet = ScriptChild("this", [], {}, tmp_path / "quiet.log")
    assert (quiet.read(), quiet.last_words()) == (None, "it wrote nothing")
    quiet.stop()
