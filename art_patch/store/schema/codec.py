"""Values as bytes in the store: zstd for text and token ids, float32 for log-probabilities, and prompt ids as blocks.

Each turn of an agent sends its whole history again, and all runs of an agent begin alike. So prompt ids are cut into
blocks of 256. A block's id is a hash over its own ids and the id of the block before it, as in an engine's prefix
cache. A call keeps the id of its last whole block, and the ids after it.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from array import array
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any

import zstandard
from pydantic_core import from_json

_LEVEL = 1  # on chat JSON 2 % larger than level 3, in 75 % of the time


class _Zstd(threading.local):
    """A compressor and a decompressor for each thread: sharing them is not safe, and making them is slow."""

    def __init__(self) -> None:
        # Without the four bytes that each zstd frame begins with: a run of 20 turns has more than 80 frames.
        bare = zstandard.FORMAT_ZSTD1_MAGICLESS
        parameters = zstandard.ZstdCompressionParameters(compression_level=_LEVEL, format=bare)
        self.compress = zstandard.ZstdCompressor(compression_params=parameters).compress
        self.decompress = zstandard.ZstdDecompressor(format=bare).decompress


_zstd = _Zstd()


def squeeze(body: bytes) -> bytes:
    """Return `body` compressed. The frame holds the length of `body`."""
    return _zstd.compress(body)


def expand(body: bytes) -> bytes:
    """Undo `squeeze`."""
    return _zstd.decompress(body)


def size_of(head: bytes) -> int | None:
    """Return how long a text was before `squeeze`, from the first 14 bytes of its frame; `None` if it does not say."""
    size = zstandard.get_frame_parameters(zstandard.FRAME_HEADER + head).content_size
    return None if size == zstandard.CONTENTSIZE_UNKNOWN else size


def parse(body: bytes | str) -> Any:
    """Return the value of a JSON text."""
    try:
        return from_json(body)
    except ValueError:  # lone surrogates, which only the standard library reads
        return json.loads(body)


def little_endian(values: array[int] | array[float]) -> bytes:
    """Return the array's bytes."""
    if sys.byteorder == "big":  # a store may be copied to another machine
        values.byteswap()
    return values.tobytes()


def uint32(ids: Iterable[int]) -> bytes:
    """Return token ids as little-endian uint32."""
    return little_endian(array("I", ids))


def squeeze_ids(ids: bytes) -> bytes:
    """Return uint32 ids compressed byte plane by byte plane."""
    # First all low bytes, then all second bytes, and so on: the high bytes are nearly all zero and compress to nothing.
    return squeeze(ids[::4] + ids[1::4] + ids[2::4] + ids[3::4])


def expand_ids(body: bytes) -> bytes:
    """Undo `squeeze_ids`."""
    planes = expand(body)
    count = len(planes) // 4
    ids = bytearray(len(planes))
    for place in range(4):
        ids[place::4] = planes[place * count : (place + 1) * count]
    return bytes(ids)


def pack_ids(ids: Iterable[int] | None) -> bytes | None:
    """Return token ids as compressed uint32."""
    return None if ids is None else squeeze_ids(uint32(ids))


def unpack_ids(body: bytes | None) -> tuple[int, ...] | None:
    """Undo `pack_ids`."""
    return None if body is None else ids_of(expand_ids(body))


def ids_of(body: bytes) -> tuple[int, ...]:
    """Undo `uint32`."""
    ids = array("I", body)
    if sys.byteorder == "big":
        ids.byteswap()
    return tuple(ids)


def pack_logprobs(logprobs: Iterable[float] | None) -> bytes | None:
    """Return log-probabilities as float32: 6e-8 relative error, far below what two kernels differ by."""
    return None if logprobs is None else little_endian(array("f", logprobs))


def unpack_logprobs(body: bytes | None) -> tuple[float, ...] | None:
    """Undo `pack_logprobs`."""
    if body is None:
        return None
    values = array("f", body)
    if sys.byteorder == "big":
        values.byteswap()
    return tuple(values)


# Ids per block. Smaller blocks make more rows. Larger blocks leave longer rests, which no two calls share.
# Never change it: blocks with another size have other ids, so nothing would be shared with blocks that are stored.
BLOCK = 256

_BYTES = 4 * BLOCK


def block_id(parent: bytes, ids: bytes) -> bytes:
    """Return the 16-byte id of the block `ids` (little-endian uint32) after the block `parent` (`b""`: the first)."""
    return blake2b(parent + b"\1" + ids, digest_size=16).digest()


def blocks(ids: bytes) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Return `(id, parent, ids)` of each whole block of a prompt's ids (little-endian uint32), in order."""
    parent = b""
    for start in range(0, len(ids) - _BYTES + 1, _BYTES):
        part = ids[start : start + _BYTES]
        block = block_id(parent, part)
        yield block, parent, part
        parent = block


def rest(ids: bytes) -> bytes:
    """Return the ids after the last whole block."""
    return ids[len(ids) // _BYTES * _BYTES :]


def run_key(trajectory_id: str) -> str:
    """Return the key in `trainings` of a run that a policy learned from outside of its groups."""
    # A hash, because this row outlives the run, and an id that the app chose may hold personal data.
    return "run:" + hashlib.blake2b(trajectory_id.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
