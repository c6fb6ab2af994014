"""The tiny model learns in an environment, against a real engine and a real trainer; and a trainer goes back."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import art_patch as art
from art_patch.rollouts.history import metrics_of
from art_patch.store import open_store
from tests.support.tiny import make_tiny_model

WORDS = ("plum", "pear", "apple", "bread")


class Bandit(art.Environment[str, str]):
    """One pull, one token: a character beyond ASCII pays, which a random model says now and then."""

    instructions = "You count."

    def reset(self, seed: int) -> str:
        return f"how many {WORDS[seed % len(WORDS)]}?"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        return "paid", float(not action.isascii()), True, {}


def test_an_environment_is_learned_and_a_trainer_goes_back_to_its_checkpoint(tmp_path: Path):
    base = make_tiny_model(tmp_path / "base", hidden=32, vocab_size=320)
    model = art.TrainableModel[None](name="bandit", project="pulls", base_model=str(base))

    def make_trainer() -> art.GRPOTrainer:
        return art.GRPOTrainer(
            art.Agent(model, max_tokens=1), Bandit, learning_rate=1e-2, batch_size=4, episodes_per_batch=512,
            max_episode_length=4, kl_penalty=0.0, group_size=64,
            config=art.TrainConfig(warmup_steps=0, epochs=10, clip_range=(0.6, 2.0), max_kl_nats=None),
        )  # fmt: skip

    async def script() -> tuple[float, float]:
        trainer = make_trainer()
        with art.LocalBackend(path=tmp_path / "home", engine="embedded", threads=1) as backend:
            await model.register(backend)
            async with model.openai_client():
                groups = await trainer.collect_episodes()
                before = metrics_of(groups)["reward"]
                result = await trainer.update_policy(groups)
                assert (result.reason, result.step, result.metrics["trajectories"]) == ("", 1, 512)
                file = await trainer.save_checkpoint(tmp_path / "kept" / "after_one.json")
                groups = await trainer.collect_episodes(range(8, 24))
                after = metrics_of(groups)["reward"]
                result = await trainer.update_policy(groups[:2])
                assert (result.reason, result.step, result.metrics["trajectories"]) == ("", 2, 128)
                other = make_trainer()
                await other.load_checkpoint(file)
                await other.load_checkpoint(file)  # it serves already
                assert (other.updates, await model.get_step(), model.get_inference_name()) == (1, 1, "bandit@1")
                (group,) = await other.collect_episodes([0])
                assert all(choice.art_patch["policy"] == "bandit@1" for run in group for choice in run.choices())  # type: ignore[attr-defined]
                file.write_text('{"policy": "bandit@7", "updates": 7, "begun": 0}')
                with pytest.raises(art.StoreError, match="bandit@7"):
                    await other.load_checkpoint(file)
        return before, after

    before, after = asyncio.run(script())
    assert after > before + 0.03, (before, after)  # the difference of 512 and 1,024 pulls is known to 0.027
    store = open_store(f"sqlite:///{tmp_path}/home/pulls/store.db")
    states = {policy.name: policy.state for policy in store.ledger.policies()}
    assert states == {"bandit@0": "retired", "bandit@1": "champion", "bandit@2": "retired"}
    assert {group.scenario_key for group in store.read.groups(state="trained")} == {
        f"scenario:seed {seed}" for seed in range(10)
    }
    assert store.verify() == []
    store.close()


def test_a_checkpoint_is_a_name_and_what_the_trainer_counts(tmp_path: Path):
    from art_patch.rollouts.checkpoints import Checkpoint, read_checkpoint, write_checkpoint

    file = write_checkpoint(tmp_path / "new" / "c.json", Checkpoint("a@3", 3, 24))
    assert json.loads(file.read_text()) == {"policy": "a@3", "updates": 3, "begun": 24}
    assert read_checkpoint(file, model="a") == Checkpoint("a@3", 3, 24)
    assert list(file.parent.iterdir()) == [file]
