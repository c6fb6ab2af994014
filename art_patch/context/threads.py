"""Makes new threads and jobs of thread pools belong to the trajectory, span and group of the code that starts them.

Python's `threading` does not do this by itself. The patched `Thread.start` hands these surroundings to the thread. The
patched `ThreadPoolExecutor.submit`, which `map` and `run_in_executor` call too, hands them to the job; the pool's
worker thread itself inherits nothing, because it serves jobs of other trajectories too. The rest of the context, such
as an active OpenTelemetry span, is not carried: OpenTelemetry's `ThreadingInstrumentor` does that, and it may be
installed before or after `patch()`. The surroundings apply in the thread until the block that started it has ended (see
`ambient`).

A fault in this module never prevents a thread from starting: the fault is counted, and the thread runs without
surroundings.
"""

import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import wrapt
from opentelemetry import context as otel

from art_patch._lib.faults import faults
from art_patch.context.ambient import Ambient, put_on, to_carry

P = ParamSpec("P")
R = TypeVar("R")

_POOLS = "concurrent.futures.thread"
# The names of our own threads begin like this. They serve the whole process, so they inherit nothing.
_OURS = "art_patch-"


class _Carrier:
    def __init__(self) -> None:
        self.on = False
        self._hooked = False
        # Class -> name of the method that was replaced, the original and our wrapper.
        self._sites: dict[type, tuple[str, Any, Any]] = {}
        self._lock = threading.RLock()

    def put_on(self) -> None:
        """Patch `Thread.start` and `ThreadPoolExecutor.submit`, so that threads and jobs inherit the trajectory."""
        with self._lock:
            self.on = True
            self._wrap(threading.Thread, "start", _starting)
            if _POOLS in sys.modules:
                self._wrap_pools(sys.modules[_POOLS])
            # The module is not imported for this: many apps never use a thread pool.
            elif not self._hooked:
                self._hooked = True
                wrapt.register_post_import_hook(self._wrap_pools, _POOLS)

    def take_off(self) -> None:
        """Restore the original functions. A wrapper that other code has wrapped again stays, and only calls through."""
        with self._lock:
            self.on = False
            for owner, (name, original, wrapper) in tuple(self._sites.items()):
                if owner.__dict__.get(name) is wrapper:
                    setattr(owner, name, original)
                    del self._sites[owner]

    def _wrap_pools(self, module: Any) -> None:
        pool = getattr(module, "ThreadPoolExecutor", None)
        if self.on and isinstance(pool, type):
            self._wrap(pool, "submit", _submitting)

    def _wrap(self, kind: type, name: str, make: Callable[[Any], Any]) -> None:
        with self._lock:
            # gevent replaces `Thread` by a subclass, before or after this.
            owner = next((base for base in kind.__mro__ if name in base.__dict__), kind)
            if owner in self._sites:
                return
            try:
                original = owner.__dict__[name]
                # A plain function: a wrapt wrapper costs as much as all the rest, and OpenTelemetry, when it removes
                # its own wrapper, would put ours back in a form that cannot be removed any more.
                wrapper = make(original)
                setattr(owner, name, wrapper)
            except Exception as error:
                faults.trouble("context.threads", error)
            else:
                self._sites[owner] = (name, original, wrapper)


_carrier = _Carrier()
carry_threads_on, carry_threads_off = _carrier.put_on, _carrier.take_off


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
    """Make `run()` begin inside `here`, and return a function that undoes this."""
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

    # On the instance, so that timers, daemons and subclasses that override `run()` are covered, and nothing is left.
    attributes["run"] = run_inside
    return take_back


def _submitting(original: Any) -> Callable[..., Any]:
    @wraps(original)
    def submit(pool: Any, /, *args: Any, **kwargs: Any) -> Any:
        submit_it = original.__get__(pool, type(pool))
        here = _to_carry()
        if here is None:
            return submit_it(*args, **kwargs)
        before = put_on(None)  # `submit` may start a worker, which must not inherit
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
    # Python 3.14 has a thread pool whose jobs are pickled and run in other interpreters.
    found = getattr(sys.modules.get("concurrent.futures.interpreter"), "InterpreterPoolExecutor", None)
    return isinstance(found, type) and isinstance(pool, found)
