"""Environments of Gymnasium and PettingZoo, the real packages, played by an agent that answers from a list."""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from pettingzoo import AECEnv
from pettingzoo.test import api_test
from pettingzoo.utils import AgentSelector

import art_patch as art
from tests.support.scripted import Scripted

PLAYERS = ["player_0", "player_1"]


class Nim(AECEnv):  # type: ignore[type-arg]
    """Seven stones; a turn takes one, two or three; who takes the last one wins."""

    metadata: ClassVar[dict[str, Any]] = {"name": "nim_v0"}

    def __init__(self, render_mode: str | None = None) -> None:
        self.possible_agents, self.render_mode = list(PLAYERS), render_mode
        mask = gymnasium.spaces.Box(0, 1, (3,), np.int8)
        board = gymnasium.spaces.Box(0, 7, (2,), np.int8)
        self.observation_spaces = {
            each: gymnasium.spaces.Dict({"observation": board, "action_mask": mask}) for each in PLAYERS
        }
        self.action_spaces = {each: gymnasium.spaces.Discrete(3) for each in PLAYERS}

    def observation_space(self, agent: str) -> Any:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> Any:
        return self.action_spaces[agent]

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents, self.stones = list(PLAYERS), 7
        self.rewards = dict.fromkeys(PLAYERS, 0)
        self._cumulative_rewards = dict.fromkeys(PLAYERS, 0)
        self.terminations, self.truncations = dict.fromkeys(PLAYERS, False), dict.fromkeys(PLAYERS, False)
        self.infos = {each: {} for each in PLAYERS}
        self._turns = AgentSelector(self.agents)
        self.agent_selection = self._turns.reset()

    def observe(self, agent: str) -> dict[str, Any]:
        legal = [agent == self.agent_selection and take < self.stones for take in range(3)]
        return {"observation": np.array([self.stones, 7], np.int8), "action_mask": np.array(legal, np.int8)}

    def render(self) -> str:
        return "o" * self.stones

    def close(self) -> None:
        self.agents = []

    def step(self, action: Any) -> None:
        player = self.agent_selection
        if self.terminations[player]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[player] = 0
        self._clear_rewards()
        self.stones -= int(action) + 1
        if not self.stones:
            self.rewards = {each: 1 if each == player else -1 for each in PLAYERS}
            self.terminations = dict.fromkeys(PLAYERS, True)
        self.agent_selection = self._turns.next()
        self._accumulate_rewards()
        self._deads_step_first()


class CornersFree(gymnasium.Env):  # type: ignore[type-arg]
    """A line of five places; the left end pays nothing, the right end one; as many steps as places."""

    observation_space, action_space = gymnasium.spaces.Discrete(5), gymnasium.spaces.Discrete(2, start=1)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(1, 4))
        return self.place, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.place += 1 if action == 2 else -1
        return self.place, float(self.place == 4), self.place in (0, 4), False, {"action_mask": [1, 1]}


def play(agent: Scripted, environment: Any, *seeds: int) -> list[list[art.Trajectory]]:
    trainer = art.GRPOTrainer(agent, environment, episodes_per_batch=2, group_size=2, max_exceptions=0)
    return [group.trajectories for group in asyncio.run(trainer.collect_episodes(seeds))]


def legal_of(state: str) -> list[str]:
    return state.rpartition("Legal actions: ")[2].split(", ")


def best(state: str) -> str:
    """Leave the other a multiple of four, if that is possible."""
    stones = int(re.search(r"\d+", state)[0])  # type: ignore[index]
    return str((stones % 4 or 1) - 1)


def test_a_gymnasium_environment_is_played_in_words():
    agent = Scripted(lambda state: "not left, I think: Right.")
    environment = art.GymnasiumEnvironment(CornersFree, instructions="Go right.", actions=("left", "right"))
    runs = [run for group in play(agent, environment, 0, 1, 2) for run in group]
    assert [run.reward for run in runs] == [1.0] * 6
    first = runs[0].messages()
    place = int(first[1]["content"][0])  # type: ignore[typeddict-item, index]
    assert first[0] == {"role": "system", "content": "Go right."}
    assert first[1]["content"] == f"{place}\nLegal actions: left, right"  # type: ignore[typeddict-item]
    assert runs[0].messages()[1] == runs[1].messages()[1]
    assert runs[0].metrics["actions"] == 4 - place


def test_a_registered_environment_is_made_by_its_id_and_masks_say_what_is_legal():
    environment = art.GymnasiumEnvironment("Taxi-v4", attempts=2, illegal_reward=-50.0, max_episode_steps=3)
    agent = Scripted(lambda state: legal_of(state)[0])
    for run in play(agent, environment, 1)[0]:
        assert (run.metrics["actions"], run.metrics["cut"], run.reward) == (3, False, -3.0)
    assert all(int(each) < 6 for messages in agent.asked for each in legal_of(messages[-1]["content"]))
    (run, _) = play(Scripted(lambda state: "5"), environment, 1)[0]  # nobody gets out here
    assert (run.reward, run.metrics["illegal"]) == (-50.0, True)
    assert "5 is not legal now. Legal actions: " in run.messages()[-2]["content"]  # type: ignore[typeddict-item, operator]


@pytest.mark.parametrize(
    ("answer", "found"),
    [("2", 2), ("1 or 2? I take 0.", 0), ("take -1, no: 1", 1), ("1.5", None), ("x2", None), ("", None)],
)
def test_the_last_number_in_an_answer_is_the_action(answer: str, found: int | None):
    environment = art.PettingZooEnvironment(Nim)
    seen = asyncio.run(environment.reset(0))
    if found is None:
        with pytest.raises(art.IllegalAction, match="Legal actions: 0, 1, 2"):
            environment.parse_action(answer, seen)
    else:
        assert environment.parse_action(answer, seen) == found
    asyncio.run(environment.close())


def test_spaces_that_cannot_be_counted_are_refused_with_what_to_do():
    with pytest.raises(art.ConfigError, match="override parse_action"):
        play(Scripted(str), art.GymnasiumEnvironment("MountainCarContinuous-v0"), 0)


@pytest.mark.filterwarnings("ignore::UserWarning:pettingzoo.test")  # of observations with a mask
def test_a_game_that_passes_pettingzoos_own_test_is_won_by_who_plays_well():
    api_test(Nim(), num_cycles=30)
    agent = Scripted(best)
    environment = art.PettingZooEnvironment(Nim, player="player_0", instructions="Take the last stone.")
    groups = play(agent, environment, 0, 1, 2)
    assert [run.reward for group in groups for run in group] == [1.0] * 6
    assert agent.asked[0][-1]["content"] == "[7, 7]\nLegal actions: 0, 1, 2"
    first, second = groups[0]
    assert first.messages() == second.messages()  # the others' chance begins with the seed, too


def test_players_take_turns_by_the_seed_and_lose_against_who_plays_well():
    async def expert(environment: art.PettingZooEnvironment, seen: Any) -> int:
        await asyncio.sleep(0)
        return int(best(str(seen.observation["observation"][0])))

    chance = random.Random(0)
    agent = Scripted(lambda state: chance.choice(legal_of(state)))
    environment = art.PettingZooEnvironment(Nim, others=expert, render_mode="ansi", actions=("one", "two", "three"))
    groups = play(agent, environment, 1, 3)
    assert [run.reward for group in groups for run in group] == [-1.0] * 4
    # player_1 moves on what the expert left; player_0 would have seen seven
    assert {messages[0]["content"] for messages in agent.asked} == {"oooo\nLegal actions: one, two, three"}


def test_self_play_asks_the_same_agent_and_only_one_side_is_learned_from():
    agent = Scripted(best)
    environment = art.PettingZooEnvironment(Nim, others=art.same_policy(agent))
    first, second = play(agent, environment, 0, 1)
    assert [run.reward for run in (*first, *second)] == [1.0, 1.0, -1.0, -1.0]
    assert len(agent.asked) == sum(len(run.choices()) for run in (*first, *second)) * 2
    silent = Scripted(lambda state: best(state) if state.startswith("[7,") else "I pass")
    (run, _) = play(silent, art.PettingZooEnvironment(Nim, player="player_0", others=art.same_policy(silent)), 0)[0]
    assert (run.metrics["actions"], run.metrics["illegal"]) == (1, True)


def test_a_player_that_is_not_there_is_told_with_those_who_are():
    with pytest.raises(art.ConfigError, match="choose one of: player_0, player_1"):
        play(Scripted(best), art.PettingZooEnvironment(Nim, player="third"), 0)
