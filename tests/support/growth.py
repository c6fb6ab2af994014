"""How the CPU time of something grows with its input; no machine is too slow, and load changes nothing about it."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

GROWTH = 15
"""Times as long may ten times as much take."""

_FLOOR_S = 0.02
"""What is quicker counts as this: clocks of some kernels tick every four milliseconds."""
_RUNS = 4
_ROUNDS = 2


class _TooLong(Exception):
    pass


@contextmanager
def _at_most(cpu_s: float) -> Iterator[None]:
    """Interrupts what would never end: `re`, too, looks for signals while it searches, though not often."""

    def stop(*_: Any) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def cpu_s(do: Callable[[Any], Any], given: Any, limit_s: float) -> float:
    """Return the least CPU time of up to four runs; one is enough if it stays within the limit."""
    best = float("inf")
    gc.disable()  # which looks at everything that there is, as often as something is made
    try:
        for _ in range(_RUNS):
            began = time.process_time()
            try:
                with _at_most(2 * limit_s):
                    do(given)
            except _TooLong:
                pass
            best = min(best, time.process_time() - began)
            if best <= limit_s:
                break
    finally:
        gc.enable()
    return best


def too_steep(do: Callable[[Any], Any], make: Callable[[int], Any], sizes: tuple[int, ...]) -> str | None:
    """Return how the time grows, if it grows more than `GROWTH` times between two sizes; each is ten times the last.

    Args:
        do: what is measured.
        make: returns what it is given, by size.
        sizes: the first is so small that nothing takes a second.
    """
    before = cpu_s(do, make(sizes[0]), GROWTH * _FLOOR_S)
    for size in sizes[1:]:
        limit_s = GROWTH * max(before, _FLOOR_S)
        took = cpu_s(do, make(size), limit_s)
        for _ in range(_ROUNDS):
            if took <= limit_s:
                break
            # The machine may have become slower in between, even in CPU time: both sizes again, one after the other.
            before = max(before, cpu_s(do, make(size // 10), 0.0))
            limit_s = GROWTH * max(before, _FLOOR_S)
            took = min(took, cpu_s(do, make(size), limit_s))
        if took > limit_s:
            return f"{before:.4f} s, and {took:.4f} s or more for ten times as much ({size})"
        before = took
    return None
