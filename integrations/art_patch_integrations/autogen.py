"""AutoGen: a run of a team, or of an agent on its own, is a trajectory of that name.

From release 0.7 on AutoGen emits OpenTelemetry spans for agents and tools. `opentelemetry_spans` makes steps of them,
if the app has a tracer provider. No span says which agents form one team, and without a provider there are no spans. So
the methods that run a team or an agent are wrapped: the run is in force until they end, also in the tasks that a team
starts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import wrapt

from art_patch.context.integration import Inside, Run, guarded


def arm(agentchat: Any) -> None:
    """Wrap the methods of `autogen_agentchat.teams` or `autogen_agentchat.agents` that run teams and agents."""
    for name in ("BaseGroupChat", "BaseChatAgent"):
        made = getattr(agentchat, name, None)
        if made is None or hasattr(made.run_stream, "__wrapped__"):
            continue
        made.run_stream = _streaming(made.run_stream)
        if name == "BaseChatAgent":  # a team's `run` calls its `run_stream`, which is wrapped already
            made.run = _running(made.run)


@guarded("integrations.autogen")
def _begin(runs: Any) -> tuple[Run, Inside]:
    run = Run(str(getattr(runs, "name", type(runs).__name__)))
    inside = run.inside()
    inside.enter()
    return run, inside


@guarded("integrations.autogen")
def _end(begun: tuple[Run, Inside] | None, error: BaseException | None) -> None:
    if begun is not None:
        run, inside = begun
        inside.leave()
        run.end(error=error)


@wrapt.decorator
async def _running(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    begun = _begin(instance)
    try:
        result = await wrapped(*args, **kwargs)
    except BaseException as error:
        _end(begun, error)
        raise
    _end(begun, None)
    return result


@wrapt.decorator
async def _streaming(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> AsyncIterator[Any]:
    begun = _begin(instance)
    try:
        async with aclosing(wrapped(*args, **kwargs)) as items:
            async for item in items:
                yield item
    except GeneratorExit:  # the app stopped reading, which is no failure
        _end(begun, None)
        raise
    except BaseException as error:
        _end(begun, error)
        raise
    _end(begun, None)
