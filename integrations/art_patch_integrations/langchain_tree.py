"""The tree of what LangChain runs, told by ids in whatever order and thread: which of it is a step of which run.

What is told of nothing that has ended stays small: the oldest parts are forgotten from so many on.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Literal

from art_patch import current_trajectory
from art_patch.context.integration import Inside, Run, Step
from art_patch_integrations.langchain_values import is_a, shown, told_of_run

MOST_KEPT = 10_000
Kind = Literal["node", "tool", "retrieval"]


@dataclass(slots=True, eq=False)
class Whole:
    """A run of a graph, as often as it is resumed.

    Attributes:
        run: the trajectory, or a part in the app's own.
        thread: graph and thread that it is resumed in.
        waits: whether an interrupt has stopped it.
        step: the graph, where the trajectory is the app's own.
        loose: whether this is no graph, but what the app calls outside of one.
    """

    run: Run
    thread: tuple[str, str] | None = None
    waits: bool = False
    step: Step | None = None
    loose: bool = False


@dataclass(slots=True, eq=False)
class Part:
    """What LangChain calls a run: of a graph, a node, a chain, a tool, a model.

    Attributes:
        whole: which run it is a part of; nothing as long as no graph is seen.
        step: the step that it is, or is in.
        told: what it was started with, for as long as it may turn out to be a graph.
        ends: what ends with it: its step, or the whole.
        inside: what it has put in force.
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
        """Take it back; once."""
        if self.inside is not None:
            self.inside.leave()


class Tree:
    """See the module. Thread-safe."""

    def __init__(self) -> None:
        """Nothing runs."""
        self._parts: OrderedDict[Any, Part] = OrderedDict()
        self._threads: OrderedDict[tuple[str, str], Whole] = OrderedDict()
        self._lock = threading.RLock()

    def get(self, run_id: Any) -> Part | None:
        """Return what runs under an id."""
        return self._parts.get(run_id)

    def chain(self, run_id: Any, parent_run_id: Any, told: dict[str, Any]) -> None:
        """Something begins that is no step in itself; it may be a graph, which only its nodes tell in old versions."""
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
        part.enter()  # for calls of the SDK without LangChain in between

    def model(self, run_id: Any, parent_run_id: Any) -> None:
        """A model is called."""
        above = self._parts.get(parent_run_id)
        if above is not None and above.whole is not None:
            part = Part(above.whole, above.step)
            self._keep(run_id, part)
            part.enter()

    def end(self, run_id: Any, output: Any = None, error: BaseException | str | None = None, **known: Any) -> None:
        """Something ended: well, badly, or in an interrupt."""
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
        """What something begins in; if LangChain knows of nothing, then in what the app has opened itself."""
        part = self._parts.get(parent_run_id)
        if part is None:
            part = Part(Whole(Run(), loose=True) if _surrounding() is not None else None)
        return part

    def _is_graph(self, part: Part) -> None:
        told, part.told = part.told, {}
        if not told:  # known as one already, or not told of here
            return
        if part.whole is None or part.whole.loose:
            shared = _surrounding() is not None
            part.whole = part.ends = self._run(told)
            if shared:
                part.step = part.whole.step = part.whole.run.step(told.get("name") or "graph", "agent")
        elif part.ends is None:
            part.step = part.ends = part.whole.run.step(told.get("name") or "graph", "agent", parent=part.step)

    def _run(self, told: dict[str, Any]) -> Whole:
        """Begin a run, or go on with the one of the same graph and thread that this resumes."""
        known = told_of_run(told)
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
    """Where the trajectory in force comes from: the app, or its tracing; one that is captured is not recorded here."""
    return getattr(current_trajectory(), "origin", None)


def _forget(known: OrderedDict[Any, Any]) -> None:
    while len(known) > MOST_KEPT:
        known.popitem(last=False)
