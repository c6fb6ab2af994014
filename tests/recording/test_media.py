"""Media become their hash; everything else stays byte for byte what it was."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from art_patch.recording.redaction import MEDIA_LIMIT_BYTES, without_media
from tests.support.growth import too_steep


def media(size: int) -> str:
    return base64.b64encode(os.urandom(size * 3 // 4 + 3)).decode()[:size]


def hashed(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()};bytes={len(text)}"


LARGE = media(MEDIA_LIMIT_BYTES + 1)
SMALL = media(MEDIA_LIMIT_BYTES)
HIDDEN = hashed(LARGE)


def test_the_shapes_of_the_sdk():
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{LARGE}"}},
        {"type": "input_audio", "input_audio": {"data": LARGE, "format": "wav"}},
        {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{LARGE}", "filename": "a.pdf"}},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{SMALL}"}},
        {"type": "text", "text": f"![a](data:image/gif;base64,{LARGE}) and words" + " and" * 30_000},
    ]
    raw = json.dumps({"model": "m", "messages": [{"role": "user", "content": parts}], "tools": [LARGE]}).encode()
    out = without_media(raw)
    assert out == raw.replace(LARGE.encode(), HIDDEN.encode())
    assert json.loads(out)["messages"][0]["content"][0]["image_url"]["url"] == f"data:image/png;base64,{HIDDEN}"


def test_what_has_no_media_is_the_same_object():
    ids = json.dumps({"prompt_token_ids": list(range(50_000)), "text": "two words " * 20_000}).encode()
    for raw in (b"", b"{}", ids, f'"{SMALL}"'.encode(), "é".encode() * 50_000, b'"' * 100_000, b"\\" * 100_000):
        assert without_media(raw) is raw


def test_a_string_that_is_cut_off():
    assert without_media(f'{{"a": "{LARGE}'.encode()) == f'{{"a": "{HIDDEN}'.encode()


PLAIN = st.one_of(st.text(max_size=200), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False))
MEDIA = st.integers(MEDIA_LIMIT_BYTES - 2, MEDIA_LIMIT_BYTES + 40_000).map(media)
WITH_MEDIA = st.one_of(
    MEDIA,
    MEDIA.map(lambda text: f"data:audio/mpeg;base64,{text}"),
    st.tuples(st.text(max_size=50), MEDIA, st.text(max_size=50)).map(
        lambda parts: f"{parts[0]} data:image/png;base64,{parts[1]}){parts[2]}"
    ),
)
VALUES = st.recursive(
    st.one_of(PLAIN, WITH_MEDIA),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=20), inner, max_size=4)),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(VALUES, st.booleans())
def test_everything_else_is_byte_identical(value: object, ascii_only: bool):
    raw = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    out = without_media(raw)
    # The same by the definition, without regard to what it costs.
    run = rb"[A-Za-z0-9+/\-_=]{%d,}" % (MEDIA_LIMIT_BYTES + 1)
    expected = re.sub(
        rb"(?<=;base64,)" + run + rb'|(?<=")' + run + rb'(?=")',
        lambda found: hashed(found[0].decode()).encode(),
        raw,
    )
    assert out == expected
    assert json.loads(out) is not NotImplemented


def test_many_markers_take_linear_time():
    assert too_steep(without_media, lambda size: b'"%s"' % (b";base64," * (size // 8)), (100_000, 1_000_000)) is None
