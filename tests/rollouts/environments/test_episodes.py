"""Environments, agents and the trainer's episodes, with a model that answers from a list."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

import art_patch as art
from tests.support.scripted import Scripted


class Counter(art.Environment[int, int]):
    """Count down from the seed: each step takes what is said away, and earns as much."""

    instructions = "Count down."

    def reset(self, seed: int) -> int:
        self.left, self.thread = seed, threading.get_ident()
        return self.left

    def step(self, action: int) -> tuple[int, float, bool, dict[str, Any]]:
        assert self.thread == threading.get_ident() != threading.main_thread().ident
        if action > self.left:
            raise art.IllegalAction(f"only {self.left} are left")
        if action == 13:
            raise RuntimeError("no thirteen")
        self.left -= action
        return self.left, float(action), self.left == 0, {"metrics": {"left": self.left}}

    def parse_action(self, answer: str, state: int) -> int:
        return int(answer)


class Patient(Counter):
    attempts = 2
    illegal_reward = -5.0


class Awaited(art.Environment[str, str]):
    """The same as coroutines, on the loop's own thread."""

    closed: ClassVar[list[int]] = []

    async def reset(self, seed: int) -> str:
        await asyncio.sleep(0)
        return f"seed {seed}"

    async def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        assert threading.current_thread() is threading.main_thread()
        return "over", float(len(action)), True, {}

    async def close(self) -> None:
        self.closed.append(1)


def one_episode(agent: art.Agent, environment: Any, seed: int = 3, **more: Any) -> art.Trajectory:
    return collect(agent, environment, seed, **more)[0].trajectories[0]


def collect(agent: art.Agent, environment: Any, *seeds: int, **more: Any) -> list[art.TrajectoryGroup]:
    trainer = art.GRPOTrainer(agent, environment, episodes_per_batch=2, group_size=2, **more)
    return asyncio.run(trainer.collect_episodes(seeds or None))


def test_an_episode_is_the_conversation_and_the_sum_of_its_rewards():
    run = one_episode(Scripted(lambda state: "1"), Counter)
    assert run.messages() == [
        {"role": "system", "content": "Count down."},
        {"role": "user", "content": "3"}, {"role": "assistant", "content": "1"},
        {"role": "user", "content": "2"}, {"role": "assistant", "content": "1"},
        {"role": "user", "content": "1"}, {"role": "assistant", "content": "1"},
    ]  # fmt: skip
    run.metrics.pop("duration")
    assert run.metrics == {"left": 0, "actions": 3, "illegal": False, "cut": False, "completion_tokens": 6}
    assert (run.reward, run.metadata, len(run.choices())) == (3.0, {"seed": 3}, 3)


def test_an_agent_that_keeps_no_history_asks_each_state_by_itself():
    agent = Scripted(lambda state: "1", keeps_history=False)
    run = one_episode(agent, Counter)
    assert [[message["content"] for message in history.messages()] for history in run.histories()] == [
        ["Count down.", "3", "1"], ["Count down.", "2", "1"], ["Count down.", "1", "1"],
    ]  # fmt: skip
    assert (len(run.choices()), run.reward) == (3, 3.0)


AGAIN = "only 1 are left\n\n1"


@pytest.mark.parametrize(
    ("environment", "answers", "reward", "illegal"),
    [
        (Counter, {"3": "2", "1": "two"}, 2.0 - 1.0, True),
        (Counter, {"3": "2", "1": "4"}, 2.0 - 1.0, True),
        (Patient, {"3": "2", "1": "4", AGAIN: "1"}, 3.0, False),
        (Patient, {"3": "2", "1": "4", AGAIN: "4"}, 2.0 - 5.0, True),
    ],
)
def test_an_answer_that_is_no_legal_action_is_asked_again_or_ends_the_episode(
    environment: Any, answers: dict[str, str], reward: float, illegal: bool
):
    run = one_episode(Scripted(answers.__getitem__), environment)
    users = [message["content"] for message in run.messages() if message["role"] == "user"]  # type: ignore[typeddict-item]
    assert (users, run.reward, run.metrics["illegal"]) == (list(answers), reward, illegal)


def test_an_episode_that_is_too_long_is_cut():
    run = one_episode(Scripted(lambda state: "1"), Counter, max_episode_length=2)
    assert (run.reward, run.metrics["actions"], run.metrics["cut"]) == (2.0, 2, True)


def test_what_an_environment_raises_costs_its_episode_alone():
    first, second = collect(Scripted(lambda state: state), Counter, 13, 4, max_exceptions=2)
    assert [len(first), len(second)] == [0, 2]
    assert [(each.type, each.message, len(each.trajectory.choices())) for each in first.exceptions] == [  # type: ignore[union-attr]
        ("RuntimeError", "no thirteen", 1)
    ] * 2
    with pytest.raises(RuntimeError, match="thirteen"):
        collect(Scripted(lambda state: state), Counter, 13)


def test_coroutine_functions_run_on_the_loop_and_what_is_given_is_copied():
    original = Awaited()
    groups = collect(Scripted(lambda state: state), original, 1, 12)
    assert [[run.reward for run in group] for group in groups] == [[6.0, 6.0], [7.0, 7.0]]
    assert [group.metadata for group in groups] == [{"scenario_id": "seed 1"}, {"scenario_id": "seed 12"}]
    assert len(Awaited.closed) == 4


def test_environments_that_wait_for_each_other_run_at_once_and_no_more_than_may():
    together, most, now = threading.Barrier(3, timeout=30), [0], [0]

    class Meets(Counter):
        def step(self, action: int) -> Any:
            now[0] += 1
            most[0] = max(most[0], now[0])
            together.wait()  # the loop has to go on for the other two to come
            now[0] -= 1
            return super().step(action)

    trainer = art.GRPOTrainer(Scripted(lambda state: state), Meets, episodes_per_batch=6, group_size=2, parallel=3)
    groups = asyncio.run(trainer.collect_episodes([1, 2, 3]))
    assert ([len(group) for group in groups], most) == ([2, 2, 2], [3])


def test_seeds_come_one_after_the_other_and_are_where_they_were_when_others_are_looked_at():
    def seeds(trainer: art.GRPOTrainer, *given: int) -> list[int]:
        groups = asyncio.run(trainer.collect_episodes(given or None))
        return [group.trajectories[0].metadata["seed"] for group in groups]

    agent = Scripted(lambda state: state)
    endless = art.GRPOTrainer(agent, Awaited, episodes_per_batch=4, group_size=2)
    assert [seeds(endless), seeds(endless, 7), seeds(endless)] == [[0, 1], [7], [2, 3]]
    few = art.GRPOTrainer(agent, Awaited, episodes_per_batch=4, group_size=2, seeds=[5, 6, 9])
    assert [seeds(few), seeds(few)] == [[5, 6], [9, 5]]


class Uncopied(Counter):
    def __init__(self) -> None:
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("environment", "more", "why"),
    [
        (Counter, {"episodes_per_batch": 9, "group_size": 2}, "multiple of group_size"),
        (Counter, {"group_size": 1}, "2 or more"),
        (Counter, {"parallel": 0}, "parallel=0"),
        (Counter, {"seeds": []}, "seeds is empty"),
        (Counter, {"kl_penalty": -1.0}, "kl_coefficient"),
        ("maze", {}, "no Environment"),
        (Uncopied(), {}, "cannot be copied"),
    ],
)
def test_mistakes_are_told_when_the_trainer_is_made(environment: Any, more: dict[str, Any], why: str):
    with pytest.raises(art.ConfigError, match=why):
        art.GRPOTrainer(Scripted(str), environment, **more)


def test_only_a_model_that_learns_is_trained_and_only_its_own_checkpoints_are_read(tmp_path: Path):
    prompted = art.GRPOTrainer(art.Agent(art.Model(name="gpt", project="p")), Counter)
    with pytest.raises(art.ConfigError, match="only answers"):
        asyncio.run(prompted.update_policy([]))
    trainer, file = art.GRPOTrainer(Scripted(str), Counter), tmp_path / "c.json"
    for text, why in (
        ("{", "is no checkpoint"),
        ('{"policy": "agent@1"}', "'updates'"),
        ('{"policy": "other@1", "updates": 1, "begun": 8}', "is of other@1"),
    ):
        file.write_text(text)
        with pytest.raises(art.ConfigError, match=why):
            asyncio.run(trainer.load_checkpoint(file))
