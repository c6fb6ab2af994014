"""Haystack: the operations that it reports to its tracer become runs (pipelines, agents) and steps (components, tools).

The proxy in front of the app's tracer is wrapped; the app's own tracer works as before. The outermost operation is a
run, named by `name` in the pipeline's metadata. Components have their names in the pipeline. Inputs and outputs are
kept for tools and retrievals; Haystack's content tracing need not be on for that. Before release 3 Haystack reports all
tool calls of an agent together, as its `tool_invoker`.

A pipeline that streams its results is not in force between them; its components name it as their parent.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import wrapt

from art_patch.context.integration import Run, Step, guarded

_PIPELINES = ("haystack.pipeline.run", "haystack.async_pipeline.run")
_COMPONENTS = {"Retriever": "retrieval", "ToolInvoker": "tool"}
"""End of a component's class name -> kind of its step; for these, inputs and outputs are kept."""
_INPUT = ("haystack.component.input", "haystack.agent.step.tool.input")
_OUTPUT = ("haystack.component.output", "haystack.agent.step.tool.output")


@dataclass
class _Place:
    """The place of one of Haystack's spans in our tree.

    Attributes:
        run: the run that it belongs to.
        step: the span's own step, or the step around it.
        own: whether `step` is the span's own.
        keeps: whether input and output are kept.
        outermost: whether the run ends with it.
        content: content tags, with input and output among them.
    """

    run: Run
    step: Step | None
    own: bool
    keeps: bool
    outermost: bool
    content: dict[str, Any] = field(default_factory=dict[str, Any])


class _Heard(wrapt.ObjectProxy):  # pyright: ignore[reportMissingTypeArgument]
    """A span of the app's tracer that also keeps content tags here."""

    def __init__(self, span: Any, place: _Place | None) -> None:
        super().__init__(span)
        self._self_place = place

    @property
    def art_patch_place(self) -> _Place | None:
        """The span's place, or `None`."""
        return self._self_place

    def set_content_tag(self, key: str, value: Any) -> None:
        """Keep a tag, even if the app's tracer does not, and pass it on."""
        place = self._self_place
        if place is not None and place.own and place.keeps:
            place.content[key] = value
        self.__wrapped__.set_content_tag(key, value)


def arm(tracer: Any) -> None:
    """Wrap the tracer's proxy; `tracer` is the module `haystack.tracing.tracer`."""
    proxy = tracer.ProxyTracer
    if not isinstance(proxy.__dict__["trace"], wrapt.ObjectProxy):
        proxy.trace = wrapt.FunctionWrapper(proxy.trace, _tracing)


def _tracing(wrapped: Any, _: Any, args: Any, kwargs: Any) -> AbstractContextManager[Any]:
    told = dict(zip(("operation_name", "tags", "parent_span"), args, strict=False)) | kwargs
    parent = told.get("parent_span")
    above = parent.art_patch_place if isinstance(parent, _Heard) else None
    place = _begun(str(told.get("operation_name")), told.get("tags") or {}, above)
    in_force = place is not None and told.get("operation_name") not in _PIPELINES
    return _traced(wrapped(*args, **kwargs), place, in_force)


@contextmanager
def _traced(theirs: Any, place: _Place | None, in_force: bool) -> Generator[Any]:
    with theirs as span:
        try:
            with place.run.inside(place.step) if place is not None and in_force else nullcontext():
                yield _Heard(span, place)
        except BaseException as error:
            _ended(place, error)
            raise
        _ended(place, None)


@guarded("integrations.haystack")
def _begun(operation: str, tags: Mapping[str, Any], above: _Place | None) -> _Place:
    known = _known(operation, tags)
    run = above.run if above is not None else Run(None if known is None else known[0])
    around = None if above is None else above.step
    if known is None:
        return _Place(run, around, False, False, above is None)
    step = run.step(*known, parent=around)
    return _Place(run, step, True, known[1] in ("tool", "retrieval"), above is None)


def _known(operation: str, tags: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return name and kind of a step; `None` for an operation inside a step."""
    if operation in _PIPELINES:
        return str((tags.get("haystack.pipeline.metadata") or {}).get("name") or "Pipeline"), "span"
    if operation == "haystack.component.run":
        component = str(tags.get("haystack.component.type"))
        kind = next((kind for end, kind in _COMPONENTS.items() if component.endswith(end)), "span")
        return str(tags.get("haystack.component.name")), kind
    if operation == "haystack.agent.run":
        return "Agent", "agent"
    if operation == "haystack.agent.step.tool":
        return str(tags.get("haystack.tool.name")), "tool"
    return None


@guarded("integrations.haystack")
def _ended(place: _Place | None, error: BaseException | None) -> None:
    if place is None:
        return
    if place.own and place.step is not None:
        made = _first(place.content, _OUTPUT)
        refused = (
            made.get("error") if isinstance(made, dict) and len(made) == 1 else None
        )  # the error that the model reads
        place.step.end(made, error=error or refused, input=_first(place.content, _INPUT))
    if place.outermost:
        place.run.end(error=error)


def _first(content: Mapping[str, Any], of: tuple[str, ...]) -> Any:
    return next((content[word] for word in of if word in content), None)
