"""Environments and agents as older guides write them."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

import art_patch as art
from art_patch.agent import Agent
from art_patch.environment import Environment
from art_patch.trainer import GRPOTrainer


class Guess(Environment[str, int]):
    """Begins without a seed."""

    async def reset(self) -> str:  # type: ignore[override]
        self.steps = 0
        return "say something"

    async def step(self, action: int) -> Any:
        self.steps += 1
        return "again", float(action), self.steps == 2, {}


class Player(Agent):
    """Reads the action itself, as older guides have it in the agent."""

    def parse_action(self, response: str, state: Any) -> int:
        assert state in ("say something", "again")
        return len(response) % 3 + random.randrange(2)


def test_an_agent_of_a_name_plays_without_a_seed_and_learns(base: Path, tmp_path: Path, monkeypatch: Any):
    monkeypatch.setenv("ART_PATCH_HOME", str(tmp_path))
    agent = Player(str(base), max_tokens=3)
    assert isinstance(agent.model, art.TrainableModel)
    assert (agent.model.name, agent.model.project, agent.model.base_model) == (base.name, base.name, str(base))

    async def whole() -> None:
        said = await agent.generate_response("hi", max_tokens=2, temperature=0.0)
        assert said == await agent.generate_response("hi", max_tokens=2, temperature=0.0)
        trainer = GRPOTrainer(
            agent, Guess, episodes_per_batch=8, group_size=4,
            config=art.TrainConfig(minibatches=1, epochs=1, max_kl_nats=None, max_clip_fraction=None),
        )  # fmt: skip
        groups = await trainer.collect_episodes()
        episodes = [episode for group in groups for episode in group]
        assert [(each.total_reward, each.metrics["actions"]) for each in episodes] == [(e.reward, 2) for e in episodes]
        before = await agent.save_checkpoint(tmp_path / "agent.json")
        result = await trainer.update_policy(groups)
        assert result.avg_reward == pytest.approx(sum(each.reward for each in episodes) / 8)
        assert (result.step, result.policy_loss, result.kl_loss) == (
            1, result.metrics["loss"], result.metrics["kl_nats"],
        )  # fmt: skip
        await agent.load_checkpoint(before)
        assert await agent.model.get_step() == 0

    try:
        asyncio.run(whole())
    finally:
        agent.model.backend().close()
