"""OpenAI Agents SDK: its traces become runs, its agents, tools, hand-overs and guardrails their steps.

A trace processor of the SDK's own kind, beside those that the app has set; what goes to OpenAI is the app's affair and
stays so. A trace is a run: workflow name -> name, `group_id` -> session. A guardrail that trips scores its run
`guardrail` 0. Calls of the model are recorded by the patch; here they only learn whose they are, and so do calls that a
tool or a guardrail makes of its own.

The SDK tells of a span in the task that opens it, right before the call. With its tracing switched off, nothing is told
and calls are recorded as without this module. A trace that is taken up again (`RunState`) goes on as the same
trajectory.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import RLock
from typing import Any, NamedTuple

import wrapt

from art_patch.context.integration import Inside, Run, Step, guarded

MOST_OPEN = 10_000
"""Runs, and spans, that may be open; the oldest are forgotten, in case that they never end."""

_KINDS = {"agent": "agent", "function": "tool", "mcp_tools": "tool", "guardrail": "guardrail", "custom": "span"}
_CALLS = ("generation", "response", "function", "guardrail")
"""What calls the model, or may. All are `with` blocks in the SDK, so what is put in force is taken back."""
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
        """Hear nothing yet; `tracing` is the SDK's module."""
        self._tracing = tracing
        self._lock = RLock()  # the garbage collector may tell of an end in the middle of a beginning
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
        if kind == "handoff":  # to whom is known by now only
            known = {"from_agent": data.from_agent, "to_agent": data.to_agent}
            run.step(data.to_agent or "handoff", "handoff", parent=step).end(error=error, **known)
        elif own and step is not None:
            told = {name: getattr(data, name, None) for name in _TOLD[kind]}
            step.end(getattr(data, "output", None), error=error, **told)
        if kind == "guardrail" and data.triggered:
            run.score("guardrail", 0, comment=data.name)

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing is kept here."""

    def force_flush(self) -> None:
        """Nothing is kept here."""

    def _run(self, trace_id: str) -> Run | None:
        run = self._runs.get(trace_id)
        if run is not None:
            return run
        trace = self._tracing.get_current_trace()  # one that is taken up again begins without telling
        return self._begin(trace) if trace is not None and trace.trace_id == trace_id else None

    def _begin(self, trace: Any) -> Run:
        run = Run(trace.name, id=trace.trace_id, session_id=trace.group_id, metadata=trace.metadata)
        with self._lock:
            self._runs[trace.trace_id] = run
            if len(self._runs) > MOST_OPEN:
                self._runs.popitem(last=False)
        return run


def arm(tracing: Any) -> None:
    """Add a processor to those of the app; also after it replaces them all.

    The SDK makes its provider, which opens an HTTP client, at the first trace; so it is not asked for here.

    Args:
        tracing: `agents.tracing`. An app's own package of that name is left alone.
    """
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
