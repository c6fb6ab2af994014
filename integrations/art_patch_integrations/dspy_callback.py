"""DSPy: a call of a module is a run; the modules and tools inside it are its steps.

The callback joins those of `dspy.settings`, also after the app sets its own. An answer that an adapter cannot parse, so
that DSPy asks again in another format, scores the run `valid` 0. The metric of `dspy.Evaluate` scores the run that made
a prediction, under the metric's name.

DSPy reports beginning and end in one task, around the work, so a module or tool is in force while it works. DSPy's own
tree says to which module a part belongs. Older releases do not tell the threads of `dspy.Parallel` of that tree; there,
the run in force decides.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from threading import RLock
from typing import Any, NamedTuple

import wrapt

from art_patch.context.integration import Inside, Run, Step, guarded

MOST_OPEN = 10_000
"""Most open parts, and most predictions under evaluation; beyond that the oldest are forgotten."""


class _Open(NamedTuple):
    run: Run
    step: Step
    inside: Inside
    outermost: bool


class Callback:
    """A `BaseCallback`, in all but the base class: DSPy is not imported here."""

    def __init__(self, active: Any) -> None:
        """Begin without open parts; `active` is DSPy's context variable with the id of the enclosing part."""
        self._active = active
        self._lock = RLock()
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._metrics: OrderedDict[str, str] = OrderedDict()
        self._made: OrderedDict[int, tuple[Any, Run]] = OrderedDict()

    @guarded("integrations.dspy")
    def on_module_start(self, call_id: str, instance: Any, inputs: Mapping[str, Any]) -> None:
        """A module is called."""
        kind = "agent" if getattr(instance, "tools", None) else "span"
        self._begin(call_id, _name(instance), kind, inputs.get("kwargs"))

    @guarded("integrations.dspy")
    def on_module_end(self, call_id: str, outputs: Any, exception: BaseException | None = None) -> None:
        """A module has answered, or failed."""
        found = self._end(call_id, _plain(outputs), exception)
        if found is not None and found.outermost and self._metrics:
            with self._lock:
                self._made[id(outputs)] = outputs, found.run
                _bound(self._made)

    @guarded("integrations.dspy")
    def on_tool_start(self, call_id: str, instance: Any, inputs: Mapping[str, Any]) -> None:
        """A tool is called."""
        self._begin(call_id, str(instance.name), "tool", inputs.get("kwargs"))

    @guarded("integrations.dspy")
    def on_tool_end(self, call_id: str, outputs: Any, exception: BaseException | None = None) -> None:
        """A tool has returned, or failed."""
        self._end(call_id, outputs, exception)

    @guarded("integrations.dspy")
    def on_adapter_parse_end(self, call_id: str, outputs: Any, exception: BaseException | None = None) -> None:
        """An answer was parsed, or its parsing failed."""
        around = self._open.get(self._active.get())
        if exception is not None and around is not None:
            around.run.score("valid", 0, comment=str(exception).strip())

    @guarded("integrations.dspy")
    def on_evaluate_start(self, call_id: str, instance: Any, inputs: Mapping[str, Any]) -> None:
        """A set of examples is about to be run."""
        metric = inputs.get("metric") or getattr(instance, "metric", None)
        with self._lock:
            self._metrics[call_id] = getattr(metric, "__name__", "metric")
            _bound(self._metrics)

    @guarded("integrations.dspy")
    def on_evaluate_end(self, call_id: str, outputs: Any, exception: BaseException | None = None) -> None:
        """The metric has judged all examples."""
        with self._lock:
            name = self._metrics.pop(call_id, "metric")
            made = dict(self._made)
            if not self._metrics:
                self._made.clear()
        for _, prediction, value in getattr(outputs, "results", None) or ():
            _, run = made.get(id(prediction), (None, None))
            if run is not None and isinstance(value, bool | int | float):
                run.score(name, float(value))

    def _begin(self, call_id: str, name: str, kind: Any, given: Any) -> None:
        above = self._open.get(self._active.get())
        run = Run(name) if above is None else above.run
        step = run.step(name, kind, parent=None if above is None else above.step, input=given)
        found = _Open(run, step, run.inside(step), above is None)
        with self._lock:
            self._open[call_id] = found
            _bound(self._open)
        found.inside.enter()

    def _end(self, call_id: str, output: Any, error: BaseException | None) -> _Open | None:
        with self._lock:
            found = self._open.pop(call_id, None)
        if found is not None:
            found.inside.leave()
            found.step.end(output, error=error)
            if found.outermost:
                found.run.end(error=error)
        return found


def arm(dspy: Any) -> None:
    """Add a callback to those of the app; also after the app sets others."""
    told, settings = dspy.utils.callback, type(dspy.settings)
    if hasattr(settings.configure, "__wrapped__"):
        return
    callback = type("ArtPatchCallback", (Callback, told.BaseCallback), {})(told.ACTIVE_CALL_ID)

    @wrapt.decorator
    def adding(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if kwargs.get("callbacks") is not None and callback not in kwargs["callbacks"]:
            kwargs = {**kwargs, "callbacks": [*kwargs["callbacks"], callback]}
        return wrapped(*args, **kwargs)

    settings.configure, settings.context = adding(settings.configure), adding(settings.context)
    dspy.configure, dspy.context = dspy.settings.configure, dspy.settings.context  # bound to the old methods at import
    dspy.settings.callbacks.append(callback)


def _name(module: Any) -> str:
    """Return `Predict(Colour)`, `Predict(question -> answer)`, or the class of the app's own module."""
    name, signature = type(module).__name__, getattr(module, "signature", None)
    if signature is None:
        return name
    title = getattr(signature, "__name__", "StringSignature")
    return f"{name}({getattr(signature, 'signature', title) if title == 'StringSignature' else title})"


def _plain(prediction: Any) -> Any:
    return prediction.toDict() if hasattr(prediction, "toDict") else prediction


def _bound(kept: OrderedDict[Any, Any]) -> None:
    if len(kept) > MOST_OPEN:
        kept.popitem(last=False)
