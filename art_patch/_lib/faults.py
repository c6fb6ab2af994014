"""Counts art_patch's own bugs in the user's process by place; logs one a minute, and raises none except under pytest.

Errors that are not bugs (the store is locked, the disk is full) are counted and logged alike, and never raised.
"""

import errno
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping

from art_patch.errors import StoreError

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
        # Outside the lock, because a handler of the app's may do anything. No message is logged at warning: that of an
        # error may hold a key or a prompt.
        if not silent:
            kind, why = type(error).__name__, cause_of(error)
            logger.warning("art_patch: %s in %s: %s (%d so far)%s", kind, place, meaning, total, why and f"; {why}")
        logger.debug("art_patch: fault in %s", place, exc_info=error)


_LONGEST_CHAIN = 8

# What databases and networks say; a message is searched for these words, and nothing else of it is repeated.
_KNOWN_WORDS = (
    "connection refused", "connection reset", "connection timeout", "timeout expired", "timed out",
    "failed to resolve host", "could not translate host name", "network is unreachable", "no route to host",
    "server closed the connection", "terminating connection", "the database system is starting up",
    "the database system is shutting down", "too many clients", "password authentication failed",
    "no password supplied", "does not exist", "permission denied", "read-only transaction", "certificate verify failed",
    "database is locked", "unable to open database file", "disk image is malformed", "database or disk is full",
    "readonly database", "disk i/o error", "not a database",
)  # fmt: skip


def cause_of(error: BaseException) -> str:
    """Return why an error happened, and at which host; empty if that is not known.

    It is put together from names of classes, the system's own words for its errors, and words that are known here. So
    it repeats no text of the app.
    """
    chain: list[BaseException] = [error]
    while (at := chain[-1].__cause__ or chain[-1].__context__) is not None and len(chain) < _LONGEST_CHAIN:
        chain.append(at)
    words = next((said for each in reversed(chain) if (said := _known_words(each))), "")
    first = "" if len(chain) == 1 else type(chain[-1]).__name__
    why = ", ".join(word for word in (first, words) if word)
    host = next((each.host for each in chain if isinstance(each, StoreError) and each.host), "")
    return "; ".join([*([f"cause: {why}"] if why else []), *([f"host: {host}"] if host else [])])


def _known_words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None and error.errno in errno.errorcode:
        return os.strerror(error.errno)
    # The methods of any other error may be the app's own, and may do anything.
    if type(error).__module__.partition(".")[0] not in ("art_patch", "psycopg", "sqlite3"):
        return ""
    said = str(error).lower()
    # SQLite's name of the error, and PostgreSQL's code.
    code = getattr(error, "sqlite_errorname", None) or getattr(error, "sqlstate", None) or ""
    return next((words for words in _KNOWN_WORDS if words in said), str(code))


def is_fault(error: BaseException) -> bool:
    """Whether `Faults.fault` has marked `error`, which it does under pytest."""
    return bool(getattr(error, "art_patch_fault", False))


faults = Faults()  # the one instance that counts the faults of this process
