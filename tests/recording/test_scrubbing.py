"""Error texts keep their sense and lose their secrets."""

from __future__ import annotations

import pytest

from art_patch.recording.scrubbing import scrub


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("Incorrect API key provided: sk-proj-abc*****xyz.", "Incorrect API key provided: ***."),
        ("Authorization: Bearer abc.def", "Authorization: ***"),
        ("with bearer abc-1", "with bearer ***"),
        ("http://me:pw@host:80/x", "http://***@host:80/x"),
        ("https://x/?api_key=abc&n=1", "https://x/?api_key=***&n=1"),
        ('{"api-key": "abc", "n": 1}', '{"api-key": "***", "n": 1}'),
        ("password=hunter2 for x", "password=*** for x"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIi.x_y", "***"),
        ("0123456789abcdef0123456789abcdef", "***"),
        ("maximum context length is 1024 tokens", "maximum context length is 1024 tokens"),
        ("The model `gpt-x` does not exist", "The model `gpt-x` does not exist"),
        (
            "max_tokens=3000 cannot be greater than max_model_len=1024",
            "max_tokens=3000 cannot be greater than max_model_len=1024",
        ),
    ],
)
def test_scrub(text, clean):
    assert scrub(text) == clean


def test_long_texts_are_cut():
    assert len(scrub("x " * 5000)) < 2100
