"""`start`: a model, its backend and what a rollout needs, for as long as a block lasts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, cast

from openai.types.chat import ChatCompletion

from art_patch.errors import ConfigError
from art_patch.rollouts.backend import LocalBackend
from art_patch.rollouts.model import TrainableModel, TrainResult
from art_patch.rollouts.trajectory import Trajectory
from art_patch.rollouts.trajectory_group import TrajectoryGroup
from art_patch.training import TrainConfig


class TrainingApi:
    """What `start` gives.

    Attributes:
        model: that learns.
    """

    def __init__(self, model: TrainableModel[Any]) -> None:
        """Speak for a registered model."""
        self.model = model

    async def create_completion(
        self, trajectory: Trajectory, *, tools: Sequence[Mapping[str, Any]] | None = None, **params: Any
    ) -> ChatCompletion:
        """Ask the model to go on with a trajectory, and append its answer there.

        Args:
            trajectory: what was said so far.
            tools: to offer, from now on; those of the trajectory unless given.
            params: of the request: `temperature`, `max_tokens`, ...

        Returns:
            The SDK's own answer; its first choice is the last item of the trajectory.

        Raises:
            ConfigError: a stream is asked for.
        """
        if params.get("stream"):
            raise ConfigError("create_completion appends whole answers; leave stream=True out")
        if tools is not None:
            trajectory.tools = cast(Any, list(tools))
        if trajectory.tools:
            params["tools"] = trajectory.tools
        answer: Any = await self.model.openai_client().chat.completions.create(
            model=self.model.name, messages=trajectory.messages(), **params
        )
        trajectory.messages_and_choices.append(answer.choices[0])
        return answer

    async def train(
        self,
        groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        *,
        eval_groups: Iterable[TrajectoryGroup] = (),
    ) -> TrainResult:
        """Learn from groups, as `TrainableModel.train` does."""
        return await self.model.train(groups, config, eval_groups=eval_groups)


@asynccontextmanager
async def start(
    model: TrainableModel[Any], backend: LocalBackend | Literal["local"] = "local", **options: Any
) -> AsyncGenerator[TrainingApi]:
    """Register a model for as long as the block lasts.

    Args:
        model: that learns.
        backend: `"local"` makes a `LocalBackend`, which ends with the block; one that is given goes on.
        options: of that `LocalBackend`.

    Raises:
        ConfigError: there is no such backend, or options come with one that is made already.
    """
    if isinstance(backend, LocalBackend):
        if options:
            raise ConfigError(f"{', '.join(options)}: give options to the LocalBackend itself")
        await model.register(backend)
        async with model.openai_client():
            yield TrainingApi(model)
        return
    if backend != "local":
        raise ConfigError(f'there is no backend {backend!r}; write backend="local", or give a LocalBackend')
    with LocalBackend(**options) as own:
        await model.register(own)
        async with model.openai_client():
            yield TrainingApi(model)
