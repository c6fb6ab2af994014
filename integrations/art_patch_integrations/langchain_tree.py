"""The tree of LangChain's runs: which part is a step of which run. Parts come by id, in any order and from any thread.

If parts never end, the tree stays small: beyond `MOST_KEPT` the oldest are forgotten.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Literal

from art_patch import current_trajectory
from art_patch.context.integration import Inside, Run, Step
from art_patch_integrations.langchain_values import is_a, run_facts, shown

MOST_KEPT = 10_000
Kind = Literal["node", "tool", "retrieval"]


@dataclass(slots=True, eq=False)
class Whole:
    """A run of a graph, from its start through all interrupts and resumptions.

    Attributes:
        run: the trajectory, or a part of the app's own trajectory.
        thread: graph and thread by which it is found when it is resumed.
        waits: whether an interrupt has stopped it.
        step: the graph's step, where the trajectory is the app's own.
        loose: whether there is no graph, and the parts are called by the app itself.
    """

    run: Run
    thread: tuple[str, str] | None = None
    waits: bool = False
    step: Step | None = None
    loose: bool = False


@dataclass(slots=True, eq=False)
class Part:
    """One of LangChain's own runs: of a graph, a node, a chain, a tool or a model.

    Attributes:
        whole: the run that it is a part of; `None` until a graph is known.
        step: its own step, or the step around it.
        told: its start's arguments, kept while it may turn out to be a graph.
        ends: the step or the whole that ends with it.
        inside: the step that it has put in force.
    """

    whole: Whole | None = None
    step: Step | None = None
    told: dict[str, Any] = field(default_factory=dict[str, Any])
    ends: Step | Whole | None = None
    inside: Inside | None = None

    def enter(self) -> None:
        """Put the step in force in the running task or thread."""
        if self.whole is not None:
            self.inside = self.whole.run.inside(self.step)
            self.inside.enter()

    def leave(self) -> None:
        """Take the step back; can be called twice."""
        if self.inside is not None:
            self.inside.leave()


class Tree:
    """All open parts. Thread-safe."""

    def __init__(self) -> None:
        """Begin without parts."""
        self._parts: OrderedDict[Any, Part] = OrderedDict()
        self._threads: OrderedDict[tuple[str, str], Whole] = OrderedDict()
        self._lock = threading.RLock()

    def get(self, run_id: Any) -> Part | None:
        """Return the open part of an id."""
        return self._parts.get(run_id)

    def chain(self, run_id: Any, parent_run_id: Any, told: dict[str, Any]) -> None:
        """A part begins that is no step itself. It may be a graph: in old versions only its nodes show that."""
        above = self._above(parent_run_id)
        part = Part(above.whole, above.step, told)
        with self._lock:
            if (part.whole is None or part.whole.loose) and "ls_integration" in (told.get("metadata") or ()):
                self._is_graph(part)
        self._keep(run_id, part)

    def step(self, run_id: Any, parent_run_id: Any, name: str, kind: Kind, **known: Any) -> None:
        """A node, tool or retrieval begins."""
        above = self._above(parent_run_id)
        if kind == "node":
            with self._lock:  # branches that run in parallel tell of their graph at the same time
                self._is_graph(above)
        if above.whole is None:
            return
        step = above.whole.run.step(name, kind, parent=above.step, **known)
        part = Part(above.whole, step, ends=step)
        self._keep(run_id, part)
        part.enter()  # for calls that a node makes by the SDK itself

    def model(self, run_id: Any, parent_run_id: Any) -> None:
        """A model is called."""
        above = self._parts.get(parent_run_id)
        if above is not None and above.whole is not None:
            part = Part(above.whole, above.step)
            self._keep(run_id, part)
            part.enter()

    def end(self, run_id: Any, output: Any = None, error: BaseException | str | None = None, **known: Any) -> None:
        """A part ended: well, with an error, or in an interrupt."""
        with self._lock:
            part = self._parts.pop(run_id, None)
        if part is None:
            return
        part.leave()
        if part.whole is None:
            return
        if is_a(error, "GraphBubbleUp"):  # an interrupt, or a command for the graph around this one
            part.whole.waits |= is_a(error, "GraphInterrupt")
            asked = getattr(error, "args", ())
            output, error = {"interrupt": shown(asked[0] if asked else None)}, None
        if isinstance(part.ends, Step):
            part.ends.end(output, error=error, **known)
        elif part.ends is not None:
            self._whole_ends(part.ends, output, error)

    def _above(self, parent_run_id: Any) -> Part:
        """Return the enclosing part; without one, the app's own trajectory, if there is one."""
        part = self._parts.get(parent_run_id)
        if part is None:
            part = Part(Whole(Run(), loose=True) if _surrounding() is not None else None)
        return part

    def _is_graph(self, part: Part) -> None:
        told, part.told = part.told, {}
        if not told:  # it is known as a graph already, or its start was not reported here
            return
        if part.whole is None or part.whole.loose:
            shared = _surrounding() is not None
            part.whole = part.ends = self._run(told)
            if shared:
                part.step = part.whole.step = part.whole.run.step(told.get("name") or "graph", "agent")
        elif part.ends is None:
            part.step = part.ends = part.whole.run.step(told.get("name") or "graph", "agent", parent=part.step)

    def _run(self, told: dict[str, Any]) -> Whole:
        """Begin a run, or go on with the run of the same graph and thread that this resumes."""
        known = run_facts(told)
        thread = None if known["session_id"] is None else (str(known["name"]), str(known["session_id"]))
        before = None if thread is None else self._threads.pop(thread, None)
        inputs = told.get("inputs")
        resumes = inputs is None or getattr(inputs, "resume", None) is not None
        if before is not None and resumes and _surrounding() in (None, "otel"):
            before.waits = False
            return before
        if before is not None and before.waits:
            before.run.end()
        return Whole(Run(**known), thread)

    def _whole_ends(self, whole: Whole, output: Any, error: BaseException | str | None) -> None:
        if whole.step is not None:
            whole.step.end(output, error=error)
        if whole.thread is not None:
            with self._lock:
                self._threads[whole.thread] = whole
                _forget(self._threads)
            if whole.waits:
                return
        whole.run.end(output, error=error)

    def _keep(self, run_id: Any, part: Part) -> None:
        with self._lock:
            self._parts[run_id] = part
            _forget(self._parts)


def _surrounding() -> str | None:
    """Return the origin of the trajectory in force: the app's block, or its tracing."""
    return getattr(current_trajectory(), "origin", None)


def _forget(known: OrderedDict[Any, Any]) -> None:
    while len(known) > MOST_KEPT:
        known.popitem(last=False)
