"""Counts art_patch's own bugs in the user's process by place; logs one a minute, and raises none except under pytest.

Errors that are not bugs (the store is locked, the disk is full) are counted and logged alike, and never raised.
"""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping

LOG_EVERY_S = 60.0

logger = logging.getLogger("art_patch")


class Unstorable(Exception):
    """The user's redaction function raised, which was counted and logged; the item must not be stored."""


class Faults:
    """Counts faults by the place where they happened. The process has one instance, `faults`."""

    def __init__(self) -> None:
        # Re-entrant: a stream may be finalised by the garbage collector while this very thread counts another fault.
        self._lock = threading.RLock()
        self._counts: Counter[str] = Counter()
        self._logged_at = float("-inf")

    @property
    def counts(self) -> Mapping[str, int]:
        """Place -> number of faults and troubles that happened there."""
        with self._lock:
            return dict(self._counts)

    def clear(self) -> None:
        """Set all counts to zero; called in a forked child and by tests."""
        # A new lock, too: the thread that held the old one at the fork does not exist in the child.
        self.__init__()

    def trouble(self, place: str, error: BaseException) -> None:
        """Count and log an error whose cause is outside art_patch, such as a full disk; never raises it."""
        self._count(place, error, "the app is not affected")

    def fault(self, place: str, error: BaseException) -> None:
        """Count and log an error that is a bug of art_patch; raises it again under pytest only."""
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
    """Whether `Faults.fault` has marked `error`, which it does under pytest."""
    return bool(getattr(error, "art_patch_fault", False))


faults = Faults()  # the one instance that counts the faults of this process
