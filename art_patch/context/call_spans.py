"""Spans that other instrumentations open around the very call that we record.

Such a span is no run of the agent: it begins and ends with one call, so taking its trace for a trajectory would tear
every conversation into single calls. It also tells all that our own span would tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CALLS = frozenset({"chat", "completion", "generate_content", "responses", "text_completion"})

_MARKS: tuple[tuple[str, frozenset[str] | None], ...] = (
    ("gen_ai.operation.name", _CALLS),  # OpenTelemetry; its agents and tools have other operations
    ("openinference.span.kind", frozenset({"LLM"})),
    ("langfuse.observation.type", frozenset({"generation"})),
    ("llm.request.type", None),  # traceloop
)
"""Attribute -> the values that make its span one of a call; `None`: any."""


def is_call_span(span: Any) -> bool:
    """Whether `span` stands for one call of a model. Spans that are not recorded have no attributes to tell by."""
    attributes: Mapping[str, Any] | None = getattr(span, "attributes", None)
    if not attributes:
        return False
    return any(name in attributes and (values is None or attributes[name] in values) for name, values in _MARKS)
