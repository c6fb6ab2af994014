"""Threads and thread pools that take the surroundings along: what `threading` itself does not do.

`Thread.start` hands what surrounds it to the thread, `ThreadPoolExecutor.submit` (and with it `map` and
`run_in_executor`) to the job. Only our own surroundings: the app's other context, an active OpenTelemetry span
included, is left to whoever carries it (OpenTelemetry's `ThreadingInstrumentor`, in either order). They hold until the
block around the start has ended (see `ambient`), and a pool's worker inherits nothing, because it serves others too.

Outside of any block the cost is one look at the context. Nothing here can keep a thread from starting: our own faults
are counted, and the thread runs without. `run()` is handed over on the instance for as long as it takes to get there,
so subclasses that override it, timers and daemons are covered, and nothing is left behind.

The wrappers are plain functions and none of wrapt's: those cost as much again as all the rest, and OpenTelemetry, when
it takes its own off, would put ours back in another form, so that nobody could take it off any more.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import wrapt
from opentelemetry import context as otel

from art_patch._lib.faults import faults
from art_patch.context.ambient import Ambient, put_on, to_carry

P = ParamSpec("P")
R = TypeVar("R")

_POOLS = "concurrent.futures.thread"
# What the names of our own threads begin with; they serve the whole process.
_OURS = "art_patch-"


class _Site(NamedTuple):
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
            self._wrap(threading.Thread, "start", _starting)
            if _POOLS in sys.modules:
                self._wrap_pools(sys.modules[_POOLS])
            elif not self._hooked:
                self._hooked = True
                wrapt.register_post_import_hook(self._wrap_pools, _POOLS)

    def take_off(self) -> None:
        with self._lock:
            self.on = False
            for site in tuple(self._sites):
                if site.owner.__dict__.get(site.name) is site.wrapper:
                    setattr(site.owner, site.name, site.original)
                    self._sites.remove(site)

    def _wrap_pools(self, module: Any) -> None:
        pool = getattr(module, "ThreadPoolExecutor", None)
        if self.on and isinstance(pool, type):
            self._wrap(pool, "submit", _submitting)

    def _wrap(self, kind: type, name: str, make: Callable[[Any], Any]) -> None:
        with self._lock:
            # gevent puts a subclass in the place of `Thread`, before or after us.
            owner = next((base for base in kind.__mro__ if name in base.__dict__), kind)
            if any(site.owner is owner for site in self._sites):
                return
            try:
                original = owner.__dict__[name]
                wrapper = make(original)
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


def _starting(original: Any) -> Callable[..., None]:
    @wraps(original)
    def start(thread: threading.Thread, *args: Any, **kwargs: Any) -> None:
        start_it = original.__get__(thread, type(thread))
        here = _to_carry()
        if here is None or thread.name.startswith(_OURS):
            return start_it(*args, **kwargs)
        try:
            take_back = _hand_over(thread, here)
        except Exception as error:
            faults.fault("context.threads", error)
            return start_it(*args, **kwargs)
        try:
            return start_it(*args, **kwargs)
        except BaseException:
            take_back()
            raise

    return start


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


def _submitting(original: Any) -> Callable[..., Any]:
    @wraps(original)
    def submit(pool: Any, /, *args: Any, **kwargs: Any) -> Any:
        submit_it = original.__get__(pool, type(pool))
        here = _to_carry()
        if here is None:
            return submit_it(*args, **kwargs)
        before = put_on(None)  # the worker that this may start must not inherit
        try:
            if not args or _is_of_interpreters(pool):
                return submit_it(*args, **kwargs)
            return submit_it(_run, here, *args, **kwargs)
        finally:
            otel.attach(before)

    return submit


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
