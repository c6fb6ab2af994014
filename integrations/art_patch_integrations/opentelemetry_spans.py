"""Frameworks that emit OpenTelemetry spans of agents and tools: the spans become steps of the trajectory.

A span processor in every tracer provider of the SDK that the app makes after `patch()`, and in the global one. It reads
the attributes of OpenTelemetry (`gen_ai.operation.name`), OpenInference, Langfuse and Traceloop that a span has at its
start, and span names of OpenTelemetry's conventions. The outermost such span is a run: its id is the trace's, or it
joins the app's own trajectory. Its session is `gen_ai.conversation.id` or `session.id`. Spans of model calls are passed
over, because the patch records the calls; each call belongs to the step that surrounds it.

Pydantic AI (`Agent.instrument_all()`): a tool call or an output that the model must give again scores the run `valid`
0. No span reports an output that fails its validation. It is inferred: the model is asked again, and no tool was
called. Releases before 2 do not say which tool calls they repeat.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from threading import RLock
from typing import Any

import wrapt
from opentelemetry import trace

from art_patch.context.integration import Run, Step, guarded
from art_patch_integrations import opentelemetry_words as words

MOST_OPEN = 10_000
"""Most open spans; beyond that the oldest are forgotten, in case they never end."""


@dataclass(slots=True, eq=False)
class _Open:
    """A span inside a run: a step of its own, or inside one."""

    run: Run
    step: Step | None
    agent: _Open | None  # innermost, perhaps itself
    root: bool  # the outermost of its run
    own: bool = False  # the step is the span
    chat: bool = False  # a call of Pydantic AI's
    answered: bool = False  # of an agent: the last thing that happened in it was an answer of the model


class Processor:
    """A `SpanProcessor`, in all but the base class: the SDK is not imported here."""

    def __init__(self) -> None:
        """Begin without open spans."""
        self._lock = RLock()  # re-entrant: the garbage collector may end a span while another begins
        self._spans: OrderedDict[int, _Open] = OrderedDict()

    @guarded("integrations.opentelemetry")
    def on_start(self, span: Any, parent_context: Any = None) -> None:
        """A span begins; it is not active yet."""
        above = None if span.parent is None else self._spans.get(span.parent.span_id)
        kind = words.kind(span)
        if above is None and kind is None:
            return  # most of an app's spans
        found = _opened(span, kind, above)
        span_id = span.get_span_context().span_id
        found.run.take_span(span_id, found.step)
        with self._lock:
            self._spans[span_id] = found
            if len(self._spans) > MOST_OPEN:
                self._spans.popitem(last=False)

    @guarded("integrations.opentelemetry")
    def on_end(self, span: Any) -> None:
        """A span is over."""
        span_id = span.get_span_context().span_id
        with self._lock:
            found = self._spans.pop(span_id, None)
        if found is None:
            return
        found.run.drop_span(span_id)
        told, error = words.words(span), words.error(span)
        if found.chat and found.agent is not None:
            found.agent.answered = error is None
        if found.own and found.step is not None:
            known = {"input": words.given(span), "call_id": told.get("gen_ai.tool.call.id")}
            found.step.end(words.returned(span), error=error, **known)
        cause = words.first(told, words.RETRY)
        if cause is not None:
            found.run.score("valid", 0, comment=f"{words.first(told, words.NAME)}: {cause}")
        if found.root:
            found.run.know(session_id=words.first(told, words.SESSION), user_id=words.first(told, words.USER))
            found.run.end()

    def _on_ending(self, span: Any) -> None:
        """Do nothing; the SDK calls it."""

    def shutdown(self) -> None:
        """Do nothing; nothing is buffered here."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Do nothing; nothing is buffered here."""
        return True


def arm(sdk: Any) -> None:
    """Add a processor to the tracer providers of the app; `sdk` is `opentelemetry.sdk.trace`."""
    provider = sdk.TracerProvider
    if hasattr(provider.__init__, "__wrapped__"):
        return
    processor = Processor()

    @wrapt.decorator
    def adding(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        instance.add_span_processor(processor)

    provider.__init__ = adding(provider.__init__)
    if isinstance(trace.get_tracer_provider(), provider):
        trace.get_tracer_provider().add_span_processor(processor)  # type: ignore[attr-defined]


def _opened(span: Any, kind: Any, above: _Open | None) -> _Open:
    told, name = words.words(span), words.name(span)
    if above is None:
        session_id, user_id = words.first(told, words.SESSION), words.first(told, words.USER)
        run = Run(name, id=f"{span.get_span_context().trace_id:032x}", session_id=session_id, user_id=user_id)
        step, agent = None, None
    else:
        run, step, agent = above.run, above.step, above.agent
    if kind is None:
        chat = _is_chat(span)
        if chat and agent is not None and agent.answered:
            run.score("valid", 0, comment="the answer was not accepted")
        return _Open(run, step, agent, above is None, chat=chat)
    if agent is not None:
        agent.answered = False
    found = _Open(run, run.step(name, kind, parent=step), agent, above is None, own=True)
    if kind == "agent":
        found.agent = found
    return found


def _is_chat(span: Any) -> bool:
    return words.is_pydantic(span) and span.attributes.get("gen_ai.operation.name") == "chat"
