"""`Agent`, and `play`: an environment, an agent and a seed become the trajectory of one episode.

One agent plays many episodes at once, so it keeps no state of any episode. Each answer's `Choice` is appended as the
model's own client gave it, with its exact tokens. An agent that plays otherwise (tools, several calls for one action)
is a subclass that overrides `generate_response` or `select_action`.

The reward of an episode is the sum of the rewards of its steps. Its metrics are `actions` (their number), `illegal`
(it ended because no answer was a legal action), `cut` (it reached the step limit before it was done), and those of the
environment. Errors of the environment and the agent are raised, and carry the trajectory into its group's `exceptions`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from art_patch.errors import ConfigError
from art_patch.rollouts.environments.environment import Environment, IllegalAction, Step, Worker
from art_patch.rollouts.trajectory import History, Trajectory, remember

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice

    from art_patch.rollouts.model import Model


class Agent:
    """A model that plays: it reads a state and answers with an action.

    Attributes:
        model: the model that answers; a `Model` that does not learn can play, too.
        keeps_history: whether each question comes with the episode's conversation so far. Otherwise each state is a
            conversation of its own, which suits long episodes whose states say everything.
        params: settings of each request: `max_tokens`, `temperature`, ...
    """

    def __init__(self, model: Model[Any], *, keeps_history: bool = True, **params: Any) -> None:
        """Take the model, and the settings of its requests."""
        self.model = model
        self.keeps_history = keeps_history
        self.params = params

    def begin(self, instructions: str) -> Trajectory:
        """Return the trajectory of a new episode, with the environment's instructions as its system message."""
        first: list[Any] = [{"role": "system", "content": instructions}] if instructions else []
        return Trajectory(messages_and_choices=first, reward=math.nan)

    async def select_action(self, state: str, trajectory: Trajectory) -> str:
        """Send a state to the model and return its answer, which the environment reads as an action.

        Args:
            state: the state as text; after an illegal action, the reason stands before it.
            trajectory: of the episode; question and answer are appended to it.
        """
        conversation = trajectory.histories()[-1].messages_and_choices
        # The first state stands in the main conversation; each later one opens a conversation of its own.
        if not self.keeps_history and trajectory.choices():
            instructions = [each for each in trajectory.messages_and_choices[:1] if _is_system(each)]
            trajectory.additional_histories.append(History(messages_and_choices=instructions))
            conversation = trajectory.additional_histories[-1].messages_and_choices
        conversation.append({"role": "user", "content": state})
        choice = await self.generate_response(trajectory)
        return choice.message.content or ""

    async def generate_response(self, trajectory: Trajectory) -> Choice:
        """Ask the model to continue the trajectory's last conversation; append its answer there and return it."""
        conversation = trajectory.histories()[-1]
        answer: Any = await self.model.openai_client().chat.completions.create(
            model=self.model.name, messages=conversation.messages(), **self.params
        )
        choice: Choice = answer.choices[0]
        conversation.messages_and_choices.append(choice)
        return choice


async def play(worker: Worker, agent: Agent, seed: int, *, max_steps: int) -> Trajectory:
    """Play one episode to its end, or for `max_steps` steps; raises the errors of the environment and the agent."""
    environment = await worker.environment()
    if environment.attempts < 1:
        raise ConfigError(f"attempts={environment.attempts} of {type(environment).__name__} must be at least 1")
    trajectory = agent.begin(environment.instructions)
    trajectory.metadata["seed"] = seed
    try:
        await _play(environment, worker, agent, trajectory, seed, max_steps)
    except Exception as error:
        # Attached here, because the gathering would take the newest trajectory, which may be an opponent's.
        remember(error, trajectory)
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
        # Replaced and not added up: an environment reports totals, such as a score.
        trajectory.metrics.update(info.get("metrics", {}))
    trajectory.reward = earned
    trajectory.metrics |= {"actions": steps, "illegal": illegal, "cut": not (done or illegal)}


async def _one_step(
    environment: Environment[Any, Any], worker: Worker, agent: Agent, trajectory: Trajectory, state: Any
) -> Step[Any] | None:
    """Ask until an action is legal and take it; return `None` if no answer is a legal action."""
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
        # Only this error: a ValueError of `step` is a mistake of the environment, which may have changed its state.
        except IllegalAction as error:
            asked = f"{error}\n\n{described}"
    return None


def _is_system(item: Any) -> bool:
    return isinstance(item, dict) and item.get("role") == "system"
