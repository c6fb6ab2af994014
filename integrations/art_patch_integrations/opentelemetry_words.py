"""Attributes of spans, by the conventions of OpenTelemetry, OpenInference, Langfuse, Traceloop and single frameworks.

Strands, Google ADK and Microsoft's Agent Framework set attributes only after the start, but their span names follow the
conventions: the operation, then the agent's or the tool's name. Strands has inputs and outputs in events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry.trace import StatusCode

KINDS: dict[str, dict[str, Any]] = {
    "gen_ai.operation.name": {"invoke_agent": "agent", "invoke_workflow": "agent", "execute_tool": "tool"},
    "openinference.span.kind": {
        "AGENT": "agent", "TOOL": "tool", "CHAIN": "span", "RETRIEVER": "retrieval", "GUARDRAIL": "guardrail",
    },
    "langfuse.observation.type": {
        "agent": "agent", "tool": "tool", "chain": "span", "retriever": "retrieval", "guardrail": "guardrail",
    },
    "traceloop.span.kind": {"agent": "agent", "tool": "tool", "workflow": "span", "task": "span"},
}  # fmt: skip
NAMED: dict[str, Any] = KINDS["gen_ai.operation.name"] | {"workflow.run": "agent", "executor.process": "node"}
"""First word of a span's name -> kind; the last two are Microsoft's."""
UNNAMED = {"gen_ai.tool.name": "tool", "agent_name": "agent"}
"""Attribute -> kind, for spans of Pydantic AI's first releases, which name no operation."""
NAME = (
    "gen_ai.tool.name", "gen_ai.agent.name", "agent_name", "tool.name", "agent.name", "traceloop.entity.name",
    "gen_ai.workflow.name", "workflow.name",
)  # fmt: skip
SESSION = ("gen_ai.conversation.id", "session.id", "langfuse.session.id")
USER = ("user.id", "enduser.id", "langfuse.user.id")
INPUT = (
    "gen_ai.tool.call.arguments", "tool_arguments", "input.value", "langfuse.observation.input",
    "traceloop.entity.input", "gcp.vertex.agent.tool_call_args",
)  # fmt: skip
OUTPUT = (
    "gen_ai.tool.call.result", "tool_response", "final_result", "output.value", "langfuse.observation.output",
    "traceloop.entity.output", "gcp.vertex.agent.tool_response",
)  # fmt: skip
RETRY = ("pydantic_ai.tool.retry.cause", "pydantic_ai.output.retry.cause")
"""Why the model must give a tool's arguments, or its output, again."""


def kind(span: Any) -> Any:
    """Return the kind of a span at its start; `None` for a span that is no part of an agent's work."""
    told = words(span)
    if "mcp.method.name" in told:
        return None  # `mcp_client` reports more of the same call
    known = next((kinds[told[word]] for word, kinds in KINDS.items() if told.get(word) in kinds), None)
    if known is not None:
        return known
    if "gen_ai.operation.name" in told:
        return None
    if is_pydantic(span):
        return next((unnamed for word, unnamed in UNNAMED.items() if word in told), None)
    return NAMED.get(span.name.partition(" ")[0])


def name(span: Any) -> str:
    """Return the name of the agent or tool."""
    first_word, _, rest = span.name.partition(" ")
    return first(words(span), NAME) or (rest if rest and first_word in NAMED else span.name)


def given(span: Any) -> str | None:
    """Return the input."""
    return first(words(span), INPUT) or _event(span, "gen_ai.tool.message", "content")


def returned(span: Any) -> str | None:
    """Return the output."""
    return first(words(span), OUTPUT) or _event(span, "gen_ai.choice", "message")


def error(span: Any) -> str | None:
    """Return the error."""
    if span.status.status_code is not StatusCode.ERROR:
        return None
    raised = _event(span, "exception", "exception.message")
    return str(span.status.description or raised or "failed")


def words(span: Any) -> Mapping[str, Any]:
    """Return the attributes."""
    return span.attributes or {}


def first(told: Mapping[str, Any], of: Iterable[str]) -> str | None:
    """Return the first of several attributes that has a value."""
    return next((str(told[word]) for word in of if told.get(word) not in (None, "")), None)


def is_pydantic(span: Any) -> bool:
    """Whether Pydantic AI made the span."""
    return getattr(span.instrumentation_scope, "name", None) == "pydantic-ai"


def _event(span: Any, named: str, word: str) -> str | None:
    said = [(event.attributes or {}).get(word) for event in span.events if event.name == named]
    return str(said[-1]) if said and said[-1] is not None else None
