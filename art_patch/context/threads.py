"""Threads and thread pools that take the surroundings along: what `threading` itself does not do.

`Thread.start` hands what surrounds it to the thread, `ThreadPoolExecutor.submit` (and with it `map` and
`run_in_executor`) to the job. Only our own surroundings: the app's other context, an active OpenTelemetry span
included, is left to whoever carries it (OpenTelemetry's `ThreadingInstrumentor`, in either order). They hold until the
block around the start has ended (see `ambient`), and a pool's worker inherits nothing, because it serves others too.

Outside of any block the cost is one look at the context. Nothing here can keep a thread from starting: our own faults
are counted, and the thread runs without. `run()` is handed over on the instance for as long as it takes to get there,
so subclasses that override it, timers and daemons are covered, and nothing is left behind.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import wrapt
from opentelemetry import context as otel

from art_patch.context.ambient import Ambient, put_on, to_carry
from art_patch.recording import faults

P = ParamSpec("P")
R = TypeVar("R")

_POOLS = "concurrent.futures.thread"
_OURS = "art_patch-"
"""What the names of our own threads begin with; they serve the whole process."""


@dataclass(frozen=True, slots=True)
class _Site:
    owner: type
    name: str
    original: Any
    wrapper: Any


class _Carrier:
    """The wrappers, and whether they do anything: one that somebody else wrapped over cannot be taken off."""

    def __init__(self) -> None:
        self.on = False
        self._hooked = False
        self._sites: list[_Site] = []
        self._lock = threading.RLock()

    def put_on(self) -> None:
        with self._lock:
            self.on = True
            self._wrap(threading.Thread, "start", _start)
            if _POOLS in sys.modules:
                self._wrap_pools(sys.modules[_POOLS])
            elif not self._hooked:
                self._hooked = True
                wrapt.register_post_import_hook(self._wrap_pools, _POOLS)

    def take_off(self) -> None:
        with self._lock:
            self.on = False
            for site in tuple(self._sites):
                found = site.owner.__dict__.get(site.name)
                # Others that wrap over us and take theirs off put back what they got by asking the class: ours, bound.
                if found is site.wrapper or getattr(found, "_self_parent", None) is site.wrapper:
                    setattr(site.owner, site.name, site.original)
                    self._sites.remove(site)

    def _wrap_pools(self, module: Any) -> None:
        pool = getattr(module, "ThreadPoolExecutor", None)
        if self.on and isinstance(pool, type):
            self._wrap(pool, "submit", _submit)

    def _wrap(self, kind: type, name: str, make: Callable[..., Any]) -> None:
        with self._lock:
            # gevent puts a subclass in the place of `Thread`, before or after us.
            owner = next((base for base in kind.__mro__ if name in base.__dict__), kind)
            if any(site.owner is owner for site in self._sites):
                return
            try:
                original = owner.__dict__[name]
                wrapper: Any = wrapt.FunctionWrapper(original, make)
                setattr(owner, name, wrapper)
            except Exception as error:
                faults.trouble("context.threads", error)
            else:
                self._sites.append(_Site(owner, name, original, wrapper))


def carry_threads_on() -> None:
    """From now on threads and thread pools take the surroundings along; nothing if they do already."""
    _carrier.put_on()


def carry_threads_off() -> None:
    """Restore the original functions, wherever nobody has wrapped over ours."""
    _carrier.take_off()


def _start(
    wrapped: Callable[[], None], thread: threading.Thread, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    here = _to_carry()
    if here is None or thread.name.startswith(_OURS):
        return wrapped(*args, **kwargs)
    try:
        take_back = _hand_over(thread, here)
    except Exception as error:
        faults.fault("context.threads", error)
        return wrapped(*args, **kwargs)
    try:
        return wrapped(*args, **kwargs)
    except BaseException:
        take_back()
        raise


def _hand_over(thread: threading.Thread, here: Ambient) -> Callable[[], None]:
    """Let `run()` begin inside `here`; return a function that undoes that."""
    run, attributes = thread.run, thread.__dict__
    before = {"run": attributes["run"]} if "run" in attributes else {}

    def run_inside() -> None:
        take_back()
        put_on(here)
        run()

    def take_back() -> None:
        if attributes.get("run") is run_inside:
            del attributes["run"]
            attributes.update(before)

    attributes["run"] = run_inside
    return take_back


def _submit(wrapped: Callable[..., Any], pool: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    here = _to_carry()
    if here is None:
        return wrapped(*args, **kwargs)
    before = put_on(None)  # the worker that this may start must not inherit
    try:
        if not args or _is_of_interpreters(pool):
            return wrapped(*args, **kwargs)
        return wrapped(_run, here, *args, **kwargs)
    finally:
        otel.attach(before)


def _run(here: Ambient, job: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    before = put_on(here)
    try:
        return job(*args, **kwargs)
    finally:
        otel.attach(before)


def _to_carry() -> Ambient | None:
    try:
        return to_carry() if _carrier.on else None
    except Exception as error:
        faults.fault("context.threads", error)
        return None


def _is_of_interpreters(pool: object) -> bool:
    # Python 3.14: a thread pool whose jobs are pickled and run in other interpreters.
    found = getattr(sys.modules.get("concurrent.futures.interpreter"), "InterpreterPoolExecutor", None)
    return isinstance(found, type) and isinstance(pool, found)


_carrier = _Carrier()
