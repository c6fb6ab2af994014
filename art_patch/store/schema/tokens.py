"""Prompt ids as chains of content-addressed blocks, so that what prompts share is kept once.

Each turn of an agent sends its whole history again, and all runs of an agent begin alike. So a prompt's ids are cut
into blocks of 256, and a block's id is a hash over its own ids and the id of the block before it, as an engine's prefix
cache does it. A call keeps the id of its last whole block and the ids that are left over.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

BLOCK = 256
"""Ids a block. Fewer: more rows. More: longer rests, which are not shared."""

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
