"""OpenAI Agents SDK: its traces become runs, its agents, tools, hand-overs and guardrails their steps.

A trace processor of the SDK's own kind, beside those that the app has set; the export to OpenAI stays as the app has
it. A trace is a run: its workflow name is the name, its `group_id` the session. A guardrail that trips scores its run
`guardrail` 0. The patch records the calls of the model. Here they get their step, as do calls that a tool or a
guardrail makes itself.

The SDK reports a span in the task that opens it, right before the call. With its tracing switched off it reports
nothing, and calls are recorded as without this module. A trace that is resumed (`RunState`) goes on as the same
trajectory.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import RLock
from typing import Any, NamedTuple

import wrapt

from art_patch.context.integration import Inside, Run, Step, guarded

MOST_OPEN = 10_000
"""Most open runs, and most open spans; beyond that the oldest are forgotten, in case they never end."""

_KINDS = {"agent": "agent", "function": "tool", "mcp_tools": "tool", "guardrail": "guardrail", "custom": "span"}
_CALLS = ("generation", "response", "function", "guardrail")
"""Spans in which the model may be called. All are `with` blocks in the SDK, so each step is taken back."""
_TOLD = {
    "agent": ("tools", "handoffs", "output_type"),
    "function": ("input", "mcp_data"),
    "guardrail": ("triggered",),
    "mcp_tools": ("server", "result"),
    "custom": ("data",),
}


class _Open(NamedTuple):
    run: Run
    step: Step | None  # innermost, this span's own or one above it
    own: bool
    inside: Inside | None


class Processor:
    """A `TracingProcessor`, in all but the base class: the SDK is not imported here."""

    def __init__(self, tracing: Any) -> None:
        """Begin without open runs; `tracing` is the SDK's module."""
        self._tracing = tracing
        self._lock = RLock()  # re-entrant: the garbage collector may end a span while another begins
        self._runs: OrderedDict[str, Run] = OrderedDict()
        self._spans: OrderedDict[str, _Open] = OrderedDict()

    @guarded("integrations.openai_agents")
    def on_trace_start(self, trace: Any) -> None:
        """A workflow begins."""
        self._begin(trace)

    @guarded("integrations.openai_agents")
    def on_trace_end(self, trace: Any) -> None:
        """A workflow is over."""
        with self._lock:
            run = self._runs.pop(trace.trace_id, None)
        if run is not None:
            run.end()

    @guarded("integrations.openai_agents")
    def on_span_start(self, span: Any) -> None:
        """A part begins, in the task that opens it."""
        above = self._spans.get(span.parent_id)
        run = above.run if above is not None else self._run(span.trace_id)
        if run is None:
            return
        data, kind = span.span_data, span.span_data.type
        step = None if above is None else above.step
        own = kind in _KINDS
        if own:
            name = getattr(data, "name", None) or kind
            step = run.step(str(name), _KINDS[kind], parent=step)  # type: ignore[arg-type]
        inside = run.inside(step) if kind in _CALLS else None
        with self._lock:
            self._spans[span.span_id] = _Open(run, step, own, inside)
            if len(self._spans) > MOST_OPEN:
                self._spans.popitem(last=False)
        if inside is not None:
            inside.enter()

    @guarded("integrations.openai_agents")
    def on_span_end(self, span: Any) -> None:
        """A part is over."""
        with self._lock:
            found = self._spans.pop(span.span_id, None)
        if found is None:
            return
        run, step, own, inside = found
        if inside is not None:
            inside.leave()
        data, kind, error = span.span_data, span.span_data.type, _error(span.error)
        if kind == "handoff":  # the target is known only at the end
            known = {"from_agent": data.from_agent, "to_agent": data.to_agent}
            run.step(data.to_agent or "handoff", "handoff", parent=step).end(error=error, **known)
        elif own and step is not None:
            told = {name: getattr(data, name, None) for name in _TOLD[kind]}
            step.end(getattr(data, "output", None), error=error, **told)
        if kind == "guardrail" and data.triggered:
            run.score("guardrail", 0, comment=data.name)

    def shutdown(self, timeout: float | None = None) -> None:
        """Do nothing; nothing is buffered here."""

    def force_flush(self) -> None:
        """Do nothing; nothing is buffered here."""

    def _run(self, trace_id: str) -> Run | None:
        run = self._runs.get(trace_id)
        if run is not None:
            return run
        trace = self._tracing.get_current_trace()  # a trace that is resumed reports no beginning
        return self._begin(trace) if trace is not None and trace.trace_id == trace_id else None

    def _begin(self, trace: Any) -> Run:
        run = Run(trace.name, id=trace.trace_id, session_id=trace.group_id, metadata=trace.metadata)
        with self._lock:
            self._runs[trace.trace_id] = run
            if len(self._runs) > MOST_OPEN:
                self._runs.popitem(last=False)
        return run


def arm(tracing: Any) -> None:
    """Add a processor to those of the app; also after the app replaces them all."""
    # The class is wrapped, because asking for the SDK's provider would make it, and it opens an HTTP client.
    # An app's own package named `agents.tracing` has no such class and is left alone.
    made = getattr(getattr(tracing, "provider", None), "DefaultTraceProvider", None)
    if made is None or hasattr(made.set_processors, "__wrapped__"):
        return
    processor = Processor(tracing)

    @wrapt.decorator
    def adding(wrapped: Any, provider: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        provider.register_processor(processor)

    made.__init__, made.set_processors = adding(made.__init__), adding(made.set_processors)
    provider: Any = getattr(getattr(tracing, "setup", None), "GLOBAL_TRACE_PROVIDER", None)
    if provider is not None:  # older releases make it when they are imported
        provider.register_processor(processor)


def _error(error: Any) -> str | None:
    if not error:
        return None
    return ": ".join(str(error[part]) for part in ("message", "data") if error.get(part))
