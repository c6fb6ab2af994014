"""Pictures, sounds and files that were sent as base64: taken out of the raw JSON before anything parses it.

Bytes in, bytes out. Fifty megabytes of base64 would keep the interpreter's lock for a second while they are parsed,
hashed and compressed, and then fill the store. So each run of more than `MEDIA_LIMIT_BYTES` that is base64 (after
`;base64,`, or a whole string such as `input_audio.data` and `file_data`) is replaced by what tells whether two are the
same:

    "data:image/png;base64,iVBORw0..."  ->  "data:image/png;base64,sha256:<hex>;bytes=<n>"

`<hex>` and `<n>` are of the base64 text as it was sent. Everything else stays byte for byte what it was, so valid JSON
stays valid. A call that was changed can be read and judged, but not trained on: its token ids belong to another prompt.

Linear, and never long without a chance for other threads: runs are found by where no quote is, a block at a time,
looked at in chunks, and hashed without the interpreter's lock.
"""

from __future__ import annotations

import hashlib
import re

MEDIA_LIMIT_BYTES = 32 << 10
"""Shorter runs stay: thumbnails, signatures, encrypted reasoning."""

UNTRAINABLE = "media was replaced by its hash"

_BLOCK = MEDIA_LIMIT_BYTES // 2
_CHUNK = 256 << 10
_FIRST_LOOK = 64
_MARKER = b";base64,"
_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/-_="
_RUN = re.compile(rb"[A-Za-z0-9+/\-_=]*")


def without_media(raw: bytes) -> bytes:
    """Return `raw` JSON with its media replaced; the very object if it has none."""
    if len(raw) <= MEDIA_LIMIT_BYTES:
        return raw
    pieces: list[bytes] = []
    kept = 0  # everything before is in `pieces`
    at = 0
    while at + _BLOCK <= len(raw):
        # A string of that length covers at least one block without a quote.
        if raw.find(b'"', at, at + _BLOCK) >= 0:
            at += _BLOCK
            continue
        start = raw.rfind(b'"', kept, at) + 1 or kept
        stop = raw.find(b'"', at + _BLOCK)
        stop = len(raw) if stop < 0 else stop
        for begin, end in _runs(raw, start, stop):
            pieces += raw[kept:begin], _hashed(raw, begin, end)
            kept = end
        at = stop
    if not kept:
        return raw
    pieces.append(raw[kept:])
    return b"".join(pieces)


def _runs(raw: bytes, start: int, stop: int) -> list[tuple[int, int]]:
    """Find the base64 between two quotes: the whole, or what follows its markers."""
    if stop - start <= MEDIA_LIMIT_BYTES:
        return []
    if _run_end(raw, start, stop) == stop:
        return [(start, stop)]
    found: list[tuple[int, int]] = []
    at = start
    while at < stop:
        marker = raw.find(_MARKER, at, min(stop, at + _CHUNK + len(_MARKER)))
        if marker < 0:
            at += _CHUNK
            continue
        begin = marker + len(_MARKER)
        at = _run_end(raw, begin, stop)
        if at - begin > MEDIA_LIMIT_BYTES:
            found.append((begin, at))
    return found


def _run_end(raw: bytes, start: int, stop: int) -> int:
    size = _FIRST_LOOK  # most runs are short, and a text may hold a marker in every eighth byte
    while start < stop:
        chunk = raw[start : min(stop, start + size)]
        if chunk.translate(None, _ALPHABET):
            match = _RUN.match(chunk)
            return start + (match.end() if match else 0)
        start += len(chunk)
        size = _CHUNK
    return stop


def _hashed(raw: bytes, begin: int, end: int) -> bytes:
    digest = hashlib.sha256(memoryview(raw)[begin:end]).hexdigest()
    return f"sha256:{digest};bytes={end - begin}".encode()
