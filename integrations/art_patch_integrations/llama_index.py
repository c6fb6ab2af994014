"""LlamaIndex: runs of agents, workflows, query engines and chat engines are trajectories, by its instrumentation.

A span handler of LlamaIndex's root dispatcher. The outermost agent, workflow or engine is the run. Inner ones, tools,
hand-overs, retrievals with their documents, and steps of the app's own workflows are its steps. The session is a
memory's `session_id`. An answer that a parser or a schema does not accept scores the run `valid` 0. LLMs, retrievers
and tools that an app calls outside of all these are recorded as without this module.

The dispatcher reports a part in the task or thread that runs it, where the part is put in force. Only the start of a
workflow is reported elsewhere, but each of its steps is reported in place. An engine that streams asks the model when
its answer is read, which is after the run.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import RLock
from typing import Any, NamedTuple

from art_patch.context.integration import Inside, Run, Step, guarded

MOST_OPEN = 10_000
"""Most open parts; beyond that the oldest are forgotten, in case they never end."""

_KINDS: dict[tuple[str, str], Any] = {
    ("Workflow", "run"): "agent",
    **{("BaseQueryEngine", method): "agent" for method in ("query", "aquery")},
    **{("BaseChatEngine", method): "agent" for method in ("chat", "achat", "stream_chat", "astream_chat")},
    **{("BaseRetriever", method): "retrieval" for method in ("retrieve", "aretrieve")},
    **{("BaseTool", method): "tool" for method in ("call", "acall")},
}
_AGENTS = ("BaseWorkflowAgent", "AgentWorkflow", "FunctionAgent", "ReActAgent", "CodeActAgent")
"""Workflows whose steps are not recorded, because their calls and tools say the same."""
_PARSING = ("structured_predict", "astructured_predict")


class _Open(NamedTuple):
    run: Run
    step: Step | None  # innermost, its own or one above it
    instance: Any
    own: bool
    root: bool
    parsing: int  # how deep in the parsing of one answer; 1 is its outermost part
    inside: Inside | None


class Handler:
    """A `BaseSpanHandler`, in all but the base class: LlamaIndex is not imported here."""

    def __init__(self) -> None:
        """Begin without open parts."""
        self.open_spans: dict[str, Any] = {}  # the dispatcher's shutdown reads it
        self._lock = RLock()  # re-entrant: the garbage collector may end a part while another begins
        self._spans: OrderedDict[str, _Open] = OrderedDict()

    @guarded("integrations.llama_index")
    def span_enter(
        self, id_: str, bound_args: Any, instance: Any = None, parent_id: str | None = None, **_: Any
    ) -> None:
        """A part begins."""
        above, known = self._spans.get(parent_id or ""), bound_args.arguments
        place, _dot, method = id_.partition("-")[0].rpartition(".")
        kind = _kind(instance, method)
        if above is None and kind != "agent":
            return
        run = _run(instance, known) if above is None else above.run
        step = None if above is None else above.step
        parsing = 0 if above is None else above.parsing
        parsing += bool(parsing or method in _PARSING)
        if above is not None and instance is not None and above.instance is instance:
            kind = None  # a tool that is async only in name calls itself
        told = _method(kind, instance, known) if kind else _workflow_step(place, method, known.get("ev"))
        if told is not None:
            kind, name, given = told
            step = run.step(name, kind, parent=step, input=given)
        inside = None if method == "run" else run.inside(step)
        with self._lock:
            self._spans[id_] = _Open(run, step, instance, told is not None, above is None, parsing, inside)
            if len(self._spans) > MOST_OPEN:
                self._spans.popitem(last=False)
        if inside is not None:
            inside.enter()

    @guarded("integrations.llama_index")
    def span_exit(self, id_: str, bound_args: Any, instance: Any = None, result: Any = None, **_: Any) -> None:
        """A part is over."""
        found = self._close(id_)
        if found is None:
            return
        if getattr(result, "retry_messages", None):  # of ReAct, whose answers are texts
            found.run.score("valid", 0, comment=str(result.retry_messages[-1].content).partition("\n")[0])
        self._end(found, result, _text(result) if getattr(result, "is_error", False) else None)

    @guarded("integrations.llama_index")
    def span_drop(
        self, id_: str, bound_args: Any, instance: Any = None, err: BaseException | None = None, **_: Any
    ) -> None:
        """A part has failed."""
        found = self._close(id_)
        if found is None:
            return
        if found.parsing == 1 and isinstance(err, ValueError):  # pydantic's and json's errors are
            found.run.score("valid", 0, comment=str(err))
        self._end(found, None, err)

    def capture_propagation_context(self) -> dict[str, Any]:
        """Return nothing to send to other processes."""
        return {}

    def restore_propagation_context(self, context: dict[str, Any]) -> None:
        """Take nothing from other processes."""

    def close(self) -> None:
        """Do nothing; nothing is buffered here."""

    def _close(self, id_: str) -> _Open | None:
        with self._lock:
            found = self._spans.pop(id_, None)
        if found is not None and found.inside is not None:
            found.inside.leave()
        return found

    @staticmethod
    def _end(found: _Open, result: Any, error: BaseException | str | None) -> None:
        if found.own and found.step is not None:
            found.step.end(_output(result), error=error)
        if found.root:
            found.run.end(error=error)


def arm(instrumentation: Any) -> None:
    """Add a span handler to the root dispatcher of `llama_index_instrumentation`."""
    root = instrumentation.root_dispatcher
    if not any(isinstance(each, Handler) for each in root.span_handlers):
        root.add_span_handler(Handler())


def _kind(instance: Any, method: str) -> Any:
    bases = {base.__name__ for base in type(instance).__mro__}
    return next((kind for (base, of), kind in _KINDS.items() if of == method and base in bases), None)


def _run(instance: Any, known: Any) -> Run:
    asked = known.get("start_event")
    memory = getattr(instance, "_memory", None) if asked is None else asked.get("memory", None)
    session = getattr(memory, "session_id", None)
    return Run(_name(instance), session_id=session if isinstance(session, str) else None)


def _method(kind: Any, instance: Any, known: Any) -> tuple[Any, str, Any]:
    """Return kind, name and input of a part that is an object's method."""
    if kind == "tool":
        given = {**known, **known.get("kwargs", {})}
        given = {key: each for key, each in given.items() if key != "kwargs" and type(each).__name__ != "Context"}
        name = str(instance.metadata.name)
        return (
            ("handoff", given["to_agent"], given) if name == "handoff" and "to_agent" in given else (kind, name, given)
        )
    start = known.get("start_event")
    said = known.get("str_or_query_bundle") or known.get("message") if start is None else start.get("user_msg", None)
    return kind, _name(instance), _text(said)


def _workflow_step(place: str, method: str, event: Any) -> tuple[Any, str, Any] | None:
    """Return kind, name and input of a workflow's step; `None` for a part that is not recorded."""
    if event is None:
        return None
    if place not in _AGENTS:
        return "node", method, event.model_dump() if hasattr(event, "model_dump") else event
    if place == "AgentWorkflow" and method == "run_agent_step":
        return "agent", event.current_agent_name, None
    return None


def _name(instance: Any) -> str:
    name = getattr(instance, "name", None)
    return name if isinstance(name, str) else type(instance).__name__


def _output(result: Any) -> Any:
    if isinstance(result, list):  # of a retriever
        return [{"text": each.get_content(), "score": each.score, "id": each.node_id} for each in result]
    if hasattr(result, "raw_output"):
        return _text(result)
    return _text(getattr(result, "result", result))


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
