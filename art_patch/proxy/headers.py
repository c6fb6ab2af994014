"""Which headers travel, in which direction, and what the callers' own `x-art-*` headers say. Pure.

Headers are lists of pairs of bytes, as ASGI has them: order, case and repetitions stay as they came.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from art_patch._lib.asgi import Pairs

# What starts like this is for the proxy, and goes no further.
OURS = b"x-art-"

# Carries the proxy's own key; `Authorization` is upstream's.
KEY = b"x-art-key"

TRAJECTORY = b"x-art-trajectory-id"

# RFC 9110, section 7.6.1; and `Expect`, which our server has answered already.
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"}
    | {b"trailer", b"transfer-encoding", b"upgrade", b"expect"}
)


@dataclass(frozen=True, slots=True)
class CallerContext:
    """What a caller says about its call.

    Attributes:
        trajectory_id: `x-art-trajectory-id`: calls with one id are one run.
        scenario: `x-art-scenario`: the task; runs with one key are compared.
        session_id: `x-art-session-id`.
        user_id: `x-art-user-id`.
        group: `x-art-group`: runs with one key are siblings.
    """

    trajectory_id: str | None = None
    scenario: str | None = None
    session_id: str | None = None
    user_id: str | None = None
    group: str | None = None

    @property
    def names_a_run(self) -> bool:
        """Whether there is anything that only a trajectory can hold."""
        return any((self.trajectory_id, self.scenario, self.session_id, self.user_id))


def caller_context(headers: Iterable[tuple[bytes, bytes]]) -> CallerContext:
    """Return what the `x-art-*` headers say; an empty one says nothing."""
    given = {name.lower(): value.decode("utf-8", "replace").strip() for name, value in headers}
    return CallerContext(
        trajectory_id=given.get(TRAJECTORY) or None,
        scenario=given.get(b"x-art-scenario") or None,
        session_id=given.get(b"x-art-session-id") or None,
        user_id=given.get(b"x-art-user-id") or None,
        group=given.get(b"x-art-group") or None,
    )


def first(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """Return the first value of a header."""
    return next((value for key, value in headers if key.lower() == name), None)


def for_upstream(headers: Iterable[tuple[bytes, bytes]], *, without: frozenset[bytes] = frozenset()) -> Pairs:
    """Return what upstream gets of a caller's headers: all but the hop's own, ours, and those in `without`."""
    return [
        (name, value)
        for name, value in _end_to_end(headers)
        if (low := name.lower()) != b"host" and not low.startswith(OURS) and low not in without
    ]


def for_caller(headers: Iterable[tuple[bytes, bytes]], *, without: frozenset[bytes] = frozenset()) -> Pairs:
    """Return what the caller gets of an answer's headers: all but the hop's own and those in `without`."""
    return [(name.lower(), value) for name, value in _end_to_end(headers) if name.lower() not in without]


def _end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Pairs:
    pairs = list(headers)
    # `Connection` may name more headers that end at this hop.
    named = {part.strip().lower() for key, value in pairs if key.lower() == b"connection" for part in value.split(b",")}
    return [(key, value) for key, value in pairs if key.lower() not in _HOP_BY_HOP | named]
