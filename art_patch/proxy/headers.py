"""Says which headers travel in which direction, and reads the callers' own `x-art-*` headers. Pure.

Headers are lists of pairs of bytes, as in ASGI, so order, case and repetitions stay as they came.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from art_patch._lib.asgi import Pairs

# Headers that begin like this are for the proxy and go no further.
OURS = b"x-art-"

# The proxy's own key. `Authorization` holds upstream's.
KEY = b"x-art-key"

TRAJECTORY = b"x-art-trajectory-id"

# RFC 9110, section 7.6.1; and `Expect`, which our server has answered already.
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"}
    | {b"trailer", b"transfer-encoding", b"upgrade", b"expect"}
)


# Header -> the argument of `trajectory()` that it becomes.
_ABOUT_THE_RUN = {
    TRAJECTORY: "id",
    b"x-art-scenario": "scenario",
    b"x-art-session-id": "session_id",
    b"x-art-user-id": "user_id",
}


def caller_context(headers: Iterable[tuple[bytes, bytes]]) -> tuple[str | None, dict[str, Any]]:
    """Return the key of the caller's group, and the arguments of `trajectory()` that its headers give."""
    given = {name.lower(): value.decode("utf-8", "replace").strip() for name, value in headers}
    about: dict[str, Any] = {argument: given[name] for name, argument in _ABOUT_THE_RUN.items() if given.get(name)}
    return given.get(b"x-art-group") or None, about


def first(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """Return the first value of a header."""
    return next((value for key, value in headers if key.lower() == name), None)


def for_upstream(headers: Iterable[tuple[bytes, bytes]], *, without: frozenset[bytes] = frozenset()) -> Pairs:
    """Return the headers that upstream gets: all but those of this hop, our own, and those in `without`."""
    return [
        (name, value)
        for name, value in _end_to_end(headers)
        if (low := name.lower()) != b"host" and not low.startswith(OURS) and low not in without
    ]


def for_caller(headers: Iterable[tuple[bytes, bytes]], *, without: frozenset[bytes] = frozenset()) -> Pairs:
    """Return the headers that the caller gets: all but those of this hop and those in `without`."""
    return [(name.lower(), value) for name, value in _end_to_end(headers) if name.lower() not in without]


def _end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Pairs:
    pairs = list(headers)
    # `Connection` may name more headers that end at this hop.
    named = {part.strip().lower() for key, value in pairs if key.lower() == b"connection" for part in value.split(b",")}
    return [(key, value) for key, value in pairs if key.lower() not in _HOP_BY_HOP | named]
