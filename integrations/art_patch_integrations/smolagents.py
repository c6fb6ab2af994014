"""smolagents: a run of an agent is a trajectory, with its tools, the code that it runs, and the agents that it manages.

The generator that makes the steps of a run is wrapped, and so are tools. A run is in force while a step is made, and
not while the app looks at a step between two. From a tool's call to its result it stays in force, because tools run in
threads meanwhile. An answer that cannot be read, a tool that is called wrongly, and a final answer that a check refuses
score the run `valid` 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import wrapt

from art_patch import current_trajectory
from art_patch.context.integration import Inside, Run, Step, guarded

_WRONG = ("AgentParsingError", "AgentToolCallError", "AgentError")
"""Errors of the model; the last one is a check's refusal. Errors of tools and code have other classes."""
_MIDST = ("ToolCall", "ToolOutput")
_END = object()


class _Running:
    """A run of an agent, by itself or inside another agent's run."""

    def __init__(self, agent: Any, task: Any) -> None:
        name = getattr(agent, "name", None) or type(agent).__name__
        self.run = Run(name)
        self.step = self.run.step(name, "agent", input=task)
        self.code: Step | None = None
        self.inside: Inside | None = None
        self.output: Any = None
        self.judged: Any = None

    @guarded("integrations.smolagents")
    def go(self) -> None:
        """Put the run in force, as the next step begins."""
        if self.inside is None:
            self.inside = self.run.inside(self.code or self.step)
            self.inside.enter()

    @guarded("integrations.smolagents")
    def hear(self, item: Any) -> None:
        """Take an item that the agent made."""
        what = type(item).__name__
        is_code = what == "ToolCall" and item.name == "python_interpreter"
        if what not in _MIDST or is_code:
            self._leave()
        if is_code:
            self.code = self.run.step(item.name, "tool", parent=self.step, input=item.arguments)
        elif what == "ActionStep" and item is not self.judged:
            self.judged = item  # smolagents may yield the last step twice
            self._judge(item)
        elif what == "FinalAnswerStep":
            self.output = item.output

    @guarded("integrations.smolagents")
    def end(self, error: BaseException | None = None) -> None:
        """End the run."""
        self._leave()
        self.step.end(None if self.output is None else str(self.output), error=error)
        self.run.end(error=error)

    def _judge(self, made: Any) -> None:
        what, error = type(made.error).__name__, None if made.error is None else str(made.error)
        if self.code is not None:
            self.code.end(made.observations, error=error if what == "AgentExecutionError" else None)
            self.code = None
        if what in _WRONG:
            self.run.score("valid", 0, comment=error)

    def _leave(self) -> None:
        inside, self.inside = self.inside, None
        if inside is not None:
            inside.leave()


@wrapt.decorator
def _running(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    running, items = _begin(instance, kwargs), wrapped(*args, **kwargs)
    if running is None:
        yield from items
        return
    try:
        while True:
            running.go()
            item = next(items, _END)
            running.hear(item)
            if item is _END:
                break
            yield item
    except GeneratorExit:  # the app stopped reading, which is no failure
        items.close()
        running.end()
        raise
    except BaseException as error:
        running.end(error)
        raise
    running.end()


@wrapt.decorator
def _using(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    begun = _call(instance, args, kwargs)
    try:
        result = wrapped(*args, **kwargs)
    except BaseException as error:
        _called(begun, None, error)
        raise
    _called(begun, result, None)
    return result


@guarded("integrations.smolagents")
def _begin(agent: Any, known: Any) -> _Running:
    return _Running(agent, known.get("task"))


@guarded("integrations.smolagents")
def _call(tool: Any, args: Any, kwargs: Any) -> tuple[Step, Inside] | None:
    if current_trajectory() is None or tool.name == "final_answer":
        return None
    given = {name: each for name, each in kwargs.items() if name != "sanitize_inputs_outputs"}
    run = Run()
    step = run.step(tool.name, "tool", input=given or list(args))
    inside = run.inside(step)
    inside.enter()
    return step, inside


@guarded("integrations.smolagents")
def _called(begun: tuple[Step, Inside] | None, result: Any, error: BaseException | None) -> None:
    if begun is not None:
        begun[1].leave()
        begun[0].end(result, error=error)


def arm(smolagents: Any) -> None:
    """Wrap the methods that make the steps of agents, and that call tools."""
    agent, tool = smolagents.MultiStepAgent, smolagents.Tool
    if not hasattr(tool.__call__, "__wrapped__"):
        agent._run_stream = _running(agent._run_stream)
        tool.__call__ = _using(tool.__call__)
