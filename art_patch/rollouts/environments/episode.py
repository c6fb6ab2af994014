"""An environment, an agent and a seed -> the trajectory of one episode.

Its reward is the sum of the rewards of its steps. Metrics: `actions`, how many it took; `illegal`, whether it ended for
want of a legal action; `cut`, whether it was as long as it may be before it was done; and those that the environment
gave. What the environment or the agent raises is raised, and carries the trajectory into its group's `exceptions`.
"""

from __future__ import annotations

from typing import Any

from art_patch.errors import ConfigError
from art_patch.rollouts.environments.agent import Agent
from art_patch.rollouts.environments.environment import Environment, IllegalAction, Step
from art_patch.rollouts.environments.environment_pool import Worker
from art_patch.rollouts.trajectory import Trajectory, remember


async def play(worker: Worker, agent: Agent, seed: int, *, max_steps: int) -> Trajectory:
    """Play one episode to its end.

    Args:
        worker: the environment at work.
        agent: that plays.
        seed: of the episode.
        max_steps: it ends after so many.

    Raises:
        ConfigError: the environment asks for no action at all.
    """
    environment = await worker.environment()
    if environment.attempts < 1:
        raise ConfigError(f"attempts={environment.attempts} of {type(environment).__name__} must be at least 1")
    trajectory = agent.begin(environment.instructions)
    trajectory.metadata["seed"] = seed
    try:
        await _play(environment, worker, agent, trajectory, seed, max_steps)
    except Exception as error:
        remember(error, trajectory)  # and not one that an opponent began in the meantime
        raise
    return trajectory.finish()


async def _play(
    environment: Environment[Any, Any], worker: Worker, agent: Agent, trajectory: Trajectory, seed: int, max_steps: int
) -> None:
    state = await worker.call(environment.reset, seed)
    earned, steps, done, illegal = 0.0, 0, False, False
    while steps < max_steps and not done:
        step = await _one_step(environment, worker, agent, trajectory, state)
        if step is None:
            earned, illegal = earned + environment.illegal_reward, True
            break
        state, reward, done, info = step
        earned, steps = earned + float(reward), steps + 1
        trajectory.metrics.update(info.get("metrics", {}))
    trajectory.reward = earned
    trajectory.metrics |= {"actions": steps, "illegal": illegal, "cut": not (done or illegal)}


async def _one_step(
    environment: Environment[Any, Any], worker: Worker, agent: Agent, trajectory: Trajectory, state: Any
) -> Step[Any] | None:
    """Ask until an action is legal, and take it; `None` if none was."""
    described: str = await worker.call(environment.describe, state)
    asked = described
    for _ in range(environment.attempts):
        answer = await agent.select_action(asked, trajectory)
        try:
            action = await worker.call(environment.parse_action, answer, state)
        except ValueError as error:
            asked = f"{error}\n\n{described}"
            continue
        try:
            return await worker.call(environment.step, action)
        except IllegalAction as error:
            asked = f"{error}\n\n{described}"
    return None
