"""AG2, from release 1 on: a question to an agent is a trajectory, with its tools and the agents that it asks.

Each agent that is made gets a middleware of AG2's own kind, as the outermost one. It surrounds a turn of the agent and
each of its tools, and puts their step in force in the task that runs them. An agent that another agent asks by a tool
is a step of it. The session is the stream, which `reply.ask()` continues. Agents of AG2 Classic are recorded as without
this module.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, NamedTuple

import wrapt

from art_patch.context.integration import Inside, Run, Step, guarded


class _Begun(NamedTuple):
    step: Step
    inside: Inside


class Turn:
    """A `BaseMiddleware`, in all but the base class: AG2 is not imported here. One a turn."""

    def __init__(self, agent: str) -> None:
        """Begin without a run; the turn opens it."""
        self._agent = agent
        self._run: Run | None = None
        self._step: Step | None = None

    async def on_turn(self, call_next: Any, event: Any, context: Any) -> Any:
        """Surround the agent's work on one message."""
        self._open(context)
        try:
            response = await self._surround(call_next(event, context), self._agent, "agent", event)
        finally:
            self._close()
        return response

    async def on_tool_execution(self, call_next: Any, event: Any, context: Any) -> Any:
        """Surround a call of a tool."""
        return await self._surround(call_next(event, context), event.name, "tool", event)

    async def on_llm_call(self, call_next: Any, events: Any, context: Any) -> Any:
        """Pass on; the patch of the SDK records the call."""
        return await call_next(events, context)

    async def on_human_input(self, call_next: Any, event: Any, context: Any) -> Any:
        """Pass on; the person's answer is in the next messages."""
        return await call_next(event, context)

    async def _surround(self, work: Awaitable[Any], name: str, kind: str, event: Any) -> Any:
        begun = self._begin(name, kind, event)
        try:
            result = await work
        except BaseException as error:
            self._end(begun, None, error)
            raise
        self._end(begun, result, getattr(result, "error", None))
        return result

    @guarded("integrations.ag2")
    def _open(self, context: Any) -> None:
        self._run = Run(self._agent, session_id=str(context.stream.id))

    @guarded("integrations.ag2")
    def _close(self) -> None:
        if self._run is not None:
            self._run.end()

    @guarded("integrations.ag2")
    def _begin(self, name: str, kind: Any, event: Any) -> _Begun | None:
        if self._run is None:
            return None
        step = self._run.step(name, kind, parent=self._step, input=event.arguments if kind == "tool" else _texts(event))
        if kind == "agent":
            self._step = step
        begun = _Begun(step, self._run.inside(step))
        begun.inside.enter()
        return begun

    @guarded("integrations.ag2")
    def _end(self, begun: _Begun | None, result: Any, error: BaseException | None) -> None:
        if begun is not None:
            begun.inside.leave()
            output = _texts(result.result) if hasattr(result, "result") else getattr(result, "content", None)
            begun.step.end(None if error else output, error=error)


class Turns:
    """Makes a middleware for each turn of an agent."""

    def __init__(self, agent: str) -> None:
        """Take the agent's name."""
        self._agent = agent

    def __call__(self, event: Any, context: Any) -> Turn:
        """Return the middleware of one turn."""
        return Turn(self._agent)


def arm(ag2: Any) -> None:
    """Give every agent that is made from now on the middleware."""
    made = getattr(ag2, "Agent", None)
    if made is None or hasattr(made.__init__, "__wrapped__"):
        return

    @wrapt.decorator
    def adding(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        _add(instance)

    made.__init__ = adding(made.__init__)


@guarded("integrations.ag2")
def _add(agent: Any) -> None:
    agent.insert_middleware(Turns(agent.name))


def _texts(said: Any) -> str | None:
    """Return the texts of a request, or of a tool's result."""
    texts = (getattr(part, "content", getattr(part, "data", None)) for part in said.parts)
    return "\n".join(str(text) for text in texts if text is not None) or None
