"""Encodes values as bytes for the store: texts and token ids with zstd, log-probabilities as float32.

Each turn of an agent sends its whole history again, and all runs of an agent begin with the same prompt. So prompt ids
are cut into blocks of 256, and each block is stored once. A block's id is a hash over its own ids and the id of the
block before it, as in an engine's prefix cache. A call's row has the id of its last complete block, and the ids after
that block.
"""

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
    """Compress `body` with zstd. The frame also records the length of `body`, for `size_of`."""
    return _zstd.compress(body)


def expand(body: bytes) -> bytes:
    """Decompress the result of `squeeze`, and return the original bytes."""
    return _zstd.decompress(body)


def size_of(head: bytes) -> int | None:
    """Return the uncompressed length of a text, from the first 14 bytes of its `squeeze` frame; `None` if unknown."""
    size = zstandard.get_frame_parameters(zstandard.FRAME_HEADER + head).content_size
    return None if size == zstandard.CONTENTSIZE_UNKNOWN else size


def parse(body: bytes | str) -> Any:
    """Parse a JSON text, also one with lone surrogates."""
    try:
        return from_json(body)
    except ValueError:  # lone surrogates, which only the standard library reads
        return json.loads(body)


def _little_endian(values: "array[Any]") -> "array[Any]":
    """Turn the array's bytes from this machine's order into little-endian order, or back."""
    if sys.byteorder == "big":  # a store may be copied to another machine
        values.byteswap()
    return values


def uint32(ids: Iterable[int]) -> bytes:
    """Return token ids as bytes: little-endian uint32, uncompressed."""
    return _little_endian(array("I", ids)).tobytes()


def ids_of(body: bytes) -> tuple[int, ...]:
    """Decode the result of `uint32` to token ids as integers."""
    return tuple(_little_endian(array("I", body)))


def squeeze_ids(ids: bytes) -> bytes:
    """Compress the bytes of `uint32`."""
    # First all low bytes, then all second bytes, and so on: the high bytes are nearly all zero and compress to nothing.
    return squeeze(ids[::4] + ids[1::4] + ids[2::4] + ids[3::4])


def expand_ids(body: bytes) -> bytes:
    """Decompress the result of `squeeze_ids` to token ids as little-endian uint32."""
    planes = expand(body)
    count = len(planes) // 4
    ids = bytearray(len(planes))
    for place in range(4):
        ids[place::4] = planes[place * count : (place + 1) * count]
    return bytes(ids)


def pack_ids(ids: Iterable[int] | None) -> bytes | None:
    """Encode token ids as compressed uint32; `None` stays `None`."""
    return None if ids is None else squeeze_ids(uint32(ids))


def unpack_ids(body: bytes | None) -> tuple[int, ...] | None:
    """Decode the result of `pack_ids` to token ids; `None` stays `None`."""
    return None if body is None else ids_of(expand_ids(body))


def pack_logprobs(logprobs: Iterable[float] | None) -> bytes | None:
    """Encode log-probabilities as float32; its error of 6e-8 is far below the difference between two kernels."""
    return None if logprobs is None else _little_endian(array("f", logprobs)).tobytes()


def unpack_logprobs(body: bytes | None) -> tuple[float, ...] | None:
    """Decode the result of `pack_logprobs` to log-probabilities; `None` stays `None`."""
    return None if body is None else tuple(_little_endian(array("f", body)))


# Ids per block. Smaller blocks make more rows. Larger blocks leave longer rests, which no two calls share.
# Never change it: blocks with another size have other ids, so nothing would be shared with blocks that are stored.
BLOCK = 256

_BYTES = 4 * BLOCK


def block_id(parent: bytes, ids: bytes) -> bytes:
    """Return the 16-byte id of the block `ids` (little-endian uint32) after the block `parent` (`b""`: the first)."""
    return blake2b(parent + b"\1" + ids, digest_size=16).digest()


def blocks(ids: bytes) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Yield `(id, parent, ids)` of each complete block of a prompt's ids (little-endian uint32), in order."""
    parent = b""
    for start in range(0, len(ids) - _BYTES + 1, _BYTES):
        part = ids[start : start + _BYTES]
        block = block_id(parent, part)
        yield block, parent, part
        parent = block


def rest(ids: bytes) -> bytes:
    """Return the ids of a prompt (little-endian uint32) that come after its last complete block."""
    return ids[len(ids) // _BYTES * _BYTES :]


RUN_KEY = "run:"  # beginning of the keys that `run_key` makes


def run_key(trajectory_id: str) -> str:
    """Return the key in the table `trainings` for a run that a policy was trained on without a group."""
    # A hash, because this row outlives the run, and an id that the app chose may hold personal data.
    return RUN_KEY + blake2b(trajectory_id.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
