"""For scripts written for OpenPipe ART's LangGraph integration: the same two names, on art_patch's own capturing.

    from art_patch_integrations.langchain import init_chat_model, wrap_rollout

    groups = [art.TrajectoryGroup(wrap_rollout(model, rollout)(scenario) for _ in range(4)) for scenario in scenarios]

The rollout's calls through `init_chat_model()` become the conversations of the trajectory that it returns, with exact
tokens; each branch and sub-agent has its own. Only asynchronous calls without streaming can be captured; others are
refused.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from importlib import import_module
from typing import Any, ParamSpec

import art_patch as art

P = ParamSpec("P")

_MODEL: ContextVar[Any] = ContextVar("art_patch_langchain_model", default=None)


def wrap_rollout(
    model: art.Model[Any], rollout: Callable[P, Awaitable[art.Trajectory]]
) -> Callable[P, Awaitable[art.Trajectory]]:
    """Return the rollout with its conversations filled in.

    Args:
        model: the model that `init_chat_model()` asks inside the rollout.
        rollout: returns a trajectory with its reward; its messages are replaced by the captured ones.
    """

    @functools.wraps(rollout)
    async def filled(*args: P.args, **kwargs: P.kwargs) -> art.Trajectory:
        made: list[art.Trajectory] = []

        async def run() -> None:
            made.append(await rollout(*args, **kwargs))

        token = _MODEL.set(model)
        try:
            captured = await art.capture_auto_trajectory(run())
        finally:
            _MODEL.reset(token)
        (trajectory,) = made
        trajectory.messages_and_choices = captured.messages_and_choices
        trajectory.tools = captured.tools
        trajectory.additional_histories = captured.additional_histories
        return trajectory

    return filled


def init_chat_model(model: str | None = None, *, model_provider: str | None = None, **options: Any) -> Any:
    """Return a `ChatOpenAI` that asks the model of the rollout around it.

    Args:
        model: accepted for scripts that give it; the rollout's model is asked in any case.
        model_provider: accepted likewise and not used.
        options: arguments of `ChatOpenAI`; the temperature is 1 unless given.

    Raises:
        ConfigError: it is called outside of a rollout.
    """
    asked = _MODEL.get()
    if asked is None:
        raise art.ConfigError("whose rollout is this? run it as `await wrap_rollout(model, rollout)(...)`")
    client = asked.openai_client()
    return import_module("langchain_openai").ChatOpenAI(
        **{"temperature": 1.0, **options},
        model=asked.name,
        api_key=client.api_key,
        base_url=str(client.base_url),
        client=_OnlyAsync(),
        root_client=_OnlyAsync(),
        async_client=client.chat.completions,
        root_async_client=client,
    )


class _OnlyAsync:
    """In place of the synchronous client, whose calls in a thread could not be captured."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise art.ConfigError("in a rollout, ask by `await ...ainvoke(...)`: other calls cannot be captured")
