"""CrewAI: a kickoff of a crew, a flow, or an agent on its own is a trajectory, made of the events of its bus.

Tasks, agents, tools with their results, retrievals, guardrails and a flow's methods are its steps. The `id` with which
a flow is started is its session. A guardrail that refuses a task's output scores the run `guardrail` 0; a tool that the
model names or calls wrongly scores it `valid` 0.

Listeners of the bus run in threads of their own, too late for the call that follows an event. So `emit` itself is
wrapped, and a step is put in force in the thread or task that emits its beginning. An open step is found again by the
context in which it began, as CrewAI does; by the crew for tasks in threads without a context; by the flow for its
methods. Older releases emit no event when a flow fails, so a flow has failed when one of its methods has.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from contextvars import ContextVar
from typing import Any, NamedTuple

import wrapt

from art_patch.context.integration import Inside, Run, Step, guarded

MOST_OPEN = 10_000
"""Most open crews and flows; beyond that the oldest are forgotten, in case they never end."""

_KINDS: dict[str, Any] = {
    "CrewKickoff": "agent",
    "Flow": "agent",
    "LiteAgentExecution": "agent",
    "AgentExecution": "agent",
    "Task": "node",
    "MethodExecution": "node",
    "ToolUsage": "tool",
    "KnowledgeRetrieval": "retrieval",
    "MemoryQuery": "retrieval",
    "LLMGuardrail": "guardrail",
}
_ROOTS = ("CrewKickoff", "Flow", "LiteAgentExecution")
_NAME = re.compile(r"(\w+?)(Started|Completed|Finished|Failed|Error)Event")
_INPUT = ("inputs", "task_prompt", "tool_args", "params", "query", "messages")
_OUTPUT = ("output", "result", "retrieved_knowledge", "results")
_WRONG = ("ToolSelectionErrorEvent", "ToolValidateInputErrorEvent")


class _Open(NamedTuple):
    what: str
    source: Any
    run: Run
    step: Step
    inside: Inside | None
    above: _Open | None


_here: ContextVar[_Open | None] = ContextVar("art_patch_crewai", default=None)
_owners: OrderedDict[int, _Open] = OrderedDict()
"""Open crews and flows, by the id of their object."""


@guarded("integrations.crewai")
def hear(source: Any, event: Any) -> None:
    """Take an event, in the thread or task that emits it."""
    told = type(event).__name__
    if told in _WRONG and (here := _here.get()) is not None:
        here.run.score("valid", 0, comment=str(event.error))
    found = _NAME.fullmatch(told)
    if found is None or found[1] not in _KINDS:
        return
    if type(source).__module__.startswith("crewai.") and found[1] in ("Flow", "MethodExecution"):
        return  # CrewAI runs an agent's own loop as a flow
    if found[2] == "Started":
        _begin(found[1], source, event)
    else:
        _end(found[1], source, event)


def _begin(what: str, source: Any, event: Any) -> None:
    crew = getattr(getattr(source, "agent", None), "crew", None)
    above = _owners.get(id(source)) if what == "MethodExecution" else _here.get() or _owners.get(id(crew))
    if above is None and what not in _ROOTS:
        return
    name, given = _title(what, source, event), _first(event, _INPUT)
    if above is None:
        session = (given or {}).get("id") if what == "Flow" else None
        run, parent = Run(name, session_id=session and str(session)), None
    else:
        run, parent = above.run, above.step
    step = run.step(name, _KINDS[what], parent=parent, input=given)
    inside = None if what == "Flow" else run.inside(step)
    opened = _Open(what, source, run, step, inside, above)
    if inside is not None:
        inside.enter()
        _here.set(opened)
    if what in ("CrewKickoff", "Flow"):
        _owners[id(source)] = opened
        if len(_owners) > MOST_OPEN:
            _owners.popitem(last=False)


def _end(what: str, source: Any, event: Any) -> None:
    opened = _owners.get(id(source)) if what == "Flow" else _here.get()
    lost: list[_Open] = []  # parts inside whose end was never emitted
    while opened is not None and not (opened.what == what and opened.source is source):
        lost.append(opened)
        opened = opened.above
    if opened is None:
        return
    if _owners.get(id(source)) is opened:
        del _owners[id(source)]
    if opened.inside is not None:
        for each in (*lost, opened):
            if each.inside is not None:
                each.inside.leave()
        _here.set(opened.above)
    output, error = _first(event, _OUTPUT), getattr(event, "error", None)
    opened.step.end(getattr(output, "raw", output), error=error and str(error))
    if what == "LLMGuardrail" and not event.success:
        opened.run.score("guardrail", 0, comment=str(error))
    if opened.above is None:
        opened.run.end(error=error and str(error))
    if what == "MethodExecution" and error:
        _end("Flow", source, event)


def arm(bus: Any) -> None:
    """Wrap `emit` of the event bus; `bus` is `crewai.events.event_bus`."""
    made = bus.CrewAIEventsBus
    if hasattr(made.emit, "__wrapped__"):
        return

    @wrapt.decorator
    def hearing(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        hear(*args, **kwargs)
        return wrapped(*args, **kwargs)

    made.emit = hearing(made.emit)


def _title(what: str, source: Any, event: Any) -> str:
    if what == "CrewKickoff":
        return event.crew_name or "crew"
    if what == "Task":
        return source.name or source.description
    if what == "AgentExecution":
        return event.agent.role
    if what == "LiteAgentExecution":
        return event.agent_info["role"]
    if what == "LLMGuardrail":
        return getattr(event, "guardrail_name", None) or "guardrail"
    return _first(event, ("tool_name", "method_name", "flow_name")) or what


def _first(event: Any, names: tuple[str, ...]) -> Any:
    return next((getattr(event, name) for name in names if getattr(event, name, None) is not None), None)
