"""Removes data that must not be stored: media from a call's bytes before they are parsed, and texts from its records.

`without_media` replaces base64 text of more than 32 KiB by its hash, because parsing and compressing 50 MB of it would
hold the interpreter's lock for a second, and it would fill the store::

    "data:image/png;base64,iVBORw0..."  ->  "data:image/png;base64,sha256:<hex>;bytes=<n>"

`<hex>` is the hash and `<n>` the length of the base64 text that was sent. All other bytes stay the same, so valid JSON
stays valid. A call that `without_media` or `Redactor` has changed can be read and judged, but not trained on.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

from art_patch.recording.scrubbing import hide
from art_patch.settings import Redact
from art_patch.types import Call, Correction, Record, Score, SpanInfo, TrajectoryInfo

REDACTED = "it was redacted"

_CACHED_TEXTS = 2_000
# An agent sends its whole conversation with each call. With the cache, each text of usual length is looked at once.
_CACHED_CHARS = 20_000


class Redactor:
    """Applies the setting `redact` to all texts of a record, but not to field names and ids.

    These are texts of messages, tools, parameters, errors, comments, metadata, span attributes and tags, and names.
    """

    def __init__(self, redact: Redact) -> None:
        self._hook: Callable[[str], str] = hide if redact == "secrets" else cast("Callable[[str], str]", redact)
        self._cached = lru_cache(maxsize=_CACHED_TEXTS)(self._hook)

    def __call__(self, record: Record) -> Record:
        """Return the record as it may be stored. If the app's function raises, so does this, and nothing is stored."""
        match record:
            case Call():
                return self._call(record)
            case TrajectoryInfo():
                return replace(record, **self._fields(record, "name", "tags", "metadata", "error"))
            case SpanInfo():
                return replace(record, **self._fields(record, "name", "attributes", "error"))
            case Score():
                return replace(record, **self._fields(record, "comment"))
            case Correction():
                return replace(record, **self._fields(record, "message", "comment"))
            case _:
                return record

    def _fields(self, record: Record, *names: str) -> dict[str, Any]:
        return {name: self._clean(getattr(record, name)) for name in names}

    def _call(self, call: Call) -> Call:
        clean = self._fields(call, "messages", "tools", "params", "error", "fallback")
        choices = tuple(replace(choice, message=self._clean(choice.message)) for choice in call.choices)
        if choices == call.choices and all(value == getattr(call, name) for name, value in clean.items()):
            return call
        # Token ids spell out the very text that was removed.
        blank = tuple(replace(choice, token_ids=None, logprobs=None) for choice in choices)
        reason = call.untrainable or REDACTED
        return replace(call, **clean, choices=blank, prompt_token_ids=None, untrainable=reason)

    def _clean(self, value: Any) -> Any:
        if isinstance(value, str):
            out: Any = (self._cached if len(value) <= _CACHED_CHARS else self._hook)(value)
            if not isinstance(out, str):
                raise TypeError(f"the redact hook returned {type(out).__name__} instead of a text")
            return out
        if isinstance(value, Mapping):
            return {key: self._clean(item) for key, item in cast("Mapping[str, Any]", value).items()}
        if isinstance(value, list):
            return [self._clean(item) for item in cast("list[Any]", value)]
        if isinstance(value, tuple):
            return tuple(self._clean(item) for item in cast("tuple[Any, ...]", value))
        return value


# Shorter texts stay: thumbnails, signatures, encrypted reasoning.
MEDIA_LIMIT_BYTES = 32 << 10

MEDIA_REPLACED = "media was replaced by its hash"

_BLOCK = MEDIA_LIMIT_BYTES // 2
_CHUNK = 256 << 10
_FIRST_LOOK = 64
_MARKER = b";base64,"
_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/-_="
_RUN = re.compile(rb"[A-Za-z0-9+/\-_=]*")


def without_media(raw: bytes) -> bytes:
    """Return the JSON text `raw` with long base64 texts replaced by their hashes; the same object if it has none."""
    if len(raw) <= MEDIA_LIMIT_BYTES:
        return raw
    pieces: list[bytes] = []
    kept = 0  # everything before is in `pieces`
    at = 0
    while at + _BLOCK <= len(raw):
        # A string longer than the limit covers at least one block without a quote.
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
    """Return where the base64 text between two quotes is: all of it, or what follows `;base64,`."""
    if stop - start <= MEDIA_LIMIT_BYTES:
        return []
    if _run_end(raw, start, stop) == stop:
        return [(start, stop)]
    found: list[tuple[int, int]] = []
    at = start
    while at < stop:
        marker = raw.find(_MARKER, at, min(stop, at + _CHUNK + len(_MARKER)))
        if marker < 0:
            # In chunks, so that other threads get the interpreter in between.
            at += _CHUNK
            continue
        begin = marker + len(_MARKER)
        at = _run_end(raw, begin, stop)
        if at - begin > MEDIA_LIMIT_BYTES:
            found.append((begin, at))
    return found


def _run_end(raw: bytes, start: int, stop: int) -> int:
    size = _FIRST_LOOK  # most are short, and a text may hold a marker in every eighth byte
    while start < stop:
        chunk = raw[start : min(stop, start + size)]
        if chunk.translate(None, _ALPHABET):
            match = _RUN.match(chunk)
            return start + (match.end() if match else 0)
        start += len(chunk)
        size = _CHUNK
    return stop


def _hashed(raw: bytes, begin: int, end: int) -> bytes:
    # `hashlib` releases the interpreter's lock while it hashes a large buffer.
    digest = hashlib.sha256(memoryview(raw)[begin:end]).hexdigest()
    return f"sha256:{digest};bytes={end - begin}".encode()
