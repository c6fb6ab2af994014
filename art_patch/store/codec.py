"""How values become bytes in the store: zstd for text and prompt ids, little-endian arrays for tokens."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

import zstandard

_LEVEL = 3  # same size as zlib at several times its speed; higher levels gain little on chat JSON


def squeeze(body: bytes) -> bytes:
    """Return `body` compressed; the frame holds its size."""
    return zstandard.compress(body, _LEVEL)


def expand(body: bytes) -> bytes:
    """Undo `squeeze`."""
    return zstandard.decompress(body)


def _little_endian(values: array[int] | array[float]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def pack_ids(ids: Iterable[int] | None) -> bytes | None:
    """Return token ids as compressed uint32."""
    return None if ids is None else squeeze(_little_endian(array("I", ids)))


def unpack_ids(body: bytes | None) -> tuple[int, ...] | None:
    """Undo `pack_ids`."""
    if body is None:
        return None
    ids = array("I", expand(body))
    if sys.byteorder == "big":
        ids.byteswap()
    return tuple(ids)


def pack_logprobs(logprobs: Iterable[float] | None) -> bytes | None:
    """Return log-probabilities as float32: 6e-8 relative error, far below what two kernels differ by."""
    return None if logprobs is None else _little_endian(array("f", logprobs))


def unpack_logprobs(body: bytes | None) -> tuple[float, ...] | None:
    """Undo `pack_logprobs`."""
    if body is None:
        return None
    values = array("f", body)
    if sys.byteorder == "big":
        values.byteswap()
    return tuple(values)
