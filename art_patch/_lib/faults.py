"""Our own faults inside the user's process: counted by place, logged at most once a minute, never raised.

Under pytest a fault is raised again, so that our bugs cannot hide behind the promise to stay silent. Troubles that
are not bugs (the store is locked, the disk is full) are counted and logged in the same way and never raised.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping

LOG_EVERY_S = 60.0

logger = logging.getLogger("art_patch")


class Unstorable(Exception):
    """The user's redaction failed and was counted as a fault; nothing of the item may be stored."""


class Faults:
    """Counts faults by place. One instance serves the whole process."""

    def __init__(self) -> None:
        # Re-entrant: a stream may be finalised by the garbage collector while this very thread counts another fault.
        self._lock = threading.RLock()
        self._counts: Counter[str] = Counter()
        self._logged_at = float("-inf")

    @property
    def counts(self) -> Mapping[str, int]:
        """How often each place failed."""
        with self._lock:
            return dict(self._counts)

    def clear(self) -> None:
        """Forget all counts; used in a forked child and by tests."""
        # A new lock, too: the thread that held the old one at the fork does not exist in the child.
        self.__init__()

    def trouble(self, place: str, error: BaseException) -> None:
        """Count an error that comes from outside of us, such as a full disk."""
        self._count(place, error, "the app is not affected")

    def fault(self, place: str, error: BaseException) -> None:
        """Count a bug of ours; raise it again under pytest."""
        self._count(place, error, "this is a bug in art_patch; the app is not affected")
        if "PYTEST_CURRENT_TEST" in os.environ:
            error.__dict__["art_patch_fault"] = True
            raise error

    def _count(self, place: str, error: BaseException, meaning: str) -> None:
        now = time.monotonic()
        with self._lock:
            self._counts[place] += 1
            total = sum(self._counts.values())
            silent = now - self._logged_at < LOG_EVERY_S
            if not silent:
                self._logged_at = now
        # Outside the lock, because a handler of the app's may do anything. Only the class is logged at warning: the
        # message of an error may hold a key or a prompt.
        if not silent:
            logger.warning("art_patch: %s in %s: %s (%d so far)", type(error).__name__, place, meaning, total)
        logger.debug("art_patch: fault in %s", place, exc_info=error)


def is_fault(error: BaseException) -> bool:
    """Whether `error` is a bug of ours that `Faults.fault` raised again."""
    return bool(getattr(error, "art_patch_fault", False))


faults = Faults()
"""The process's counter."""
