"""Haystack: what it tells its tracer becomes runs: pipelines and agents, and inside them components and tools.

The proxy in front of the app's tracer, if there is one, is heard; what the app has set goes on. The outermost is a run:
its name is `name` of the pipeline's metadata. Components have the names that the pipeline gives them. Of tools and
retrievals is kept what went in and came out; Haystack's content tracing need not be on for that. Before release 3 the
calls of an agent's tools are told of together, as its `tool_invoker`.

A pipeline that hands out its results one by one is not in force between them: its components name it as their parent.
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
"""Kinds of components whose content is kept, by the end of their class's name."""
_INPUT = ("haystack.component.input", "haystack.agent.step.tool.input")
_OUTPUT = ("haystack.component.output", "haystack.agent.step.tool.output")


@dataclass
class _Place:
    """Where a span of Haystack's is in our tree.

    Attributes:
        run: whose part it is.
        step: its own, or the one around it.
        own: which of the two.
        keeps: whether what goes in and comes out is kept.
        outermost: whether it says when the run ends.
        content: what went in and came out.
    """

    run: Run
    step: Step | None
    own: bool
    keeps: bool
    outermost: bool
    content: dict[str, Any] = field(default_factory=dict[str, Any])


class _Heard(wrapt.ObjectProxy):  # pyright: ignore[reportMissingTypeArgument]
    """A span of the app's tracer, whose content is heard."""

    def __init__(self, span: Any, place: _Place | None) -> None:
        super().__init__(span)
        self._self_place = place

    @property
    def art_patch_place(self) -> _Place | None:
        """Where it is."""
        return self._self_place

    def set_content_tag(self, key: str, value: Any) -> None:
        """Hear it, though the app's tracer may not."""
        place = self._self_place
        if place is not None and place.own and place.keeps:
            place.content[key] = value
        self.__wrapped__.set_content_tag(key, value)


def arm(tracer: Any) -> None:
    """Hear what the tracer is told.

    Args:
        tracer: `haystack.tracing.tracer`.
    """
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
    """Name and kind of a step; none for what is a part of a step."""
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
        refused = made.get("error") if isinstance(made, dict) and len(made) == 1 else None  # which the model is told
        place.step.end(made, error=error or refused, input=_first(place.content, _INPUT))
    if place.outermost:
        place.run.end(error=error)


def _first(content: Mapping[str, Any], of: tuple[str, ...]) -> Any:
    return next((content[word] for word in of if word in content), None)
