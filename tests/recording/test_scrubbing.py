"""Error texts keep their sense and lose their secrets."""

from __future__ import annotations

import random
import re

import pytest

from art_patch.recording import described, scrubbing
from art_patch.recording.scrubbing import _CALLED, _NO_SECRET, MAX_ERROR_CHARS, hide, scrub
from tests.support.growth import too_steep


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
        # The hash that names a task is none, but a secret in its place is, and so is one that an app calls its task.
        ("ruins task:d309a99bf96eaef1a867543da96b74a5, too", "ruins task:d309a99bf96eaef1a867543da96b74a5, too"),
        ("(task:d309a99bf96eaef1a867543da96b74a5)", "(task:d309a99bf96eaef1a867543da96b74a5)"),
        ("task:d309a99bf96eaef1a867543da96b74a5d3", "task:***"),
        ("task:d309a99bf96eaef1a867543da96b74a5-x", "task:***"),
        ("task:D309A99BF96EAEF1A867543DA96B74A5", "task:***"),
        ("task:sk-proj-abc12345", "task:***"),
        ("scenario:d309a99bf96eaef1a867543da96b74a5", "scenario:***"),
        ("maximum context length is 1024 tokens", "maximum context length is 1024 tokens"),
        ("The model `gpt-x` does not exist", "The model `gpt-x` does not exist"),
        (
            "max_tokens=3000 cannot be greater than max_model_len=1024",
            "max_tokens=3000 cannot be greater than max_model_len=1024",
        ),
        ("x-key: abc, key=def; my-sig = 'ghi'", "x-key: ***, key=***; my-sig = '***'"),
        ("url=token=abc", "url=token=***"),
        ("proxy_password=a=b c", "proxy_password=*** c"),
        ("--0123456789abcdef0123456789abcdef--", "--***--"),
        ("a-very-long-name-without-any-number-in-it", "a-very-long-name-without-any-number-in-it"),
        ("password: ", "password: "),
        ("OpenAI-Organization: org-AbCd1234EfGh5678 has no access", "OpenAI-Organization: *** has no access"),
        ("project `proj_AbCd1234EfGh` is archived", "project `***` is archived"),
        ("an org-wide proj_management_board", "an org-wide proj_management_board"),
        ("https://login/cb?code=4%2F0Ab_x&n=1", "https://login/cb?code=***&n=1"),
        ("https://maps/api?n=1&key=x-7&z=2", "https://maps/api?n=1&key=***&z=2"),
        ("error code=400", "error code=400"),
        ("the password is swordfish.", "the password is ***."),
        ("the password is not set, and the token was expired", "the password is not set, and the token was expired"),
        ("Incorrect API key provided: ab12-x. You can", "Incorrect API key provided: ***. You can"),
        ("invalid API key 'ab12x', or token 7f3a", "invalid API key '***', or token ***"),
        ("Unexpected token 1024 in JSON", "Unexpected token 1024 in JSON"),
    ],
)
def test_scrub(text, clean):
    assert scrub(text) == clean


_DEFINITION = (
    (r"(?i)(://)[^/\s@'\"]+@", r"\1***@"),
    (r"(?i)\b(bearer|basic)\s+[^\s'\",;]+", r"\1 ***"),
    (
        r"(?i)([\w-]*(?:api[_-]?key|access[_-]?key|secret|password|passwd|authorization|credential|signature)"
        r"[\w-]*|\b(?:key|token|sig|auth))(['\"]?\s*[:=]\s*['\"]?)(?!\s)(?:(?:bearer|basic)\s+)?[^\s'\",;&}\])]+",
        r"\1\2***",
    ),
    (r"\b(?:sk|pk|rk|hf|ghp|gho|xox[a-z]|AKIA|AIza)[-_]?[A-Za-z0-9*_-]{6,}", "***"),
    (r"\beyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]+)*", "***"),
    (
        r"\b(?!(?<=\btask:)[0-9a-f]{32}(?![\w-]))(?=[A-Za-z_-]*\d)(?=[\d_-]*[A-Za-z])[A-Za-z0-9_-]{32,}\b",
        "***",
    ),
    (r"\b(?:org-|proj_)(?=[A-Za-z]*\d)[A-Za-z0-9]{8,}\b", "***"),
    (r"(?i)([?&](?:code|ticket|session|sid|pass|pwd)=)[^\s'\",;&}\])]+", r"\1***"),
    (rf"(?i)(\b{_CALLED}\s{{1,4}}['\"]?)(?=[a-z_-]*\d)(?=[\d_-]*[a-z])[^\s'\",;]*[^\s'\",;.:!?)\]}}]", r"\1***"),
    (
        rf"(?i)(\b{_CALLED}(?:\s{{1,4}}(?:provided|given|used|sent))?(?:\s{{1,4}}(?:is|was)|\s{{0,4}}:)\s{{1,4}}"
        rf"['\"]?)(?!(?:{_NO_SECRET})\b)[^\s'\",;]*[^\s'\",;.:!?)\]}}]",
        r"\1***",
    ),
)
"""What a secret is, in ten expressions; too slow for any but short texts."""

_PIECES = (
    "api_key", "apikey", "API-KEY", "key", "token", "max_tokens", "my-token", "sig", "auth", "Authorization", "bearer ",
    "Basic ", "secret", "Password", "client_secret", "=", ":", " : ", "= ", '"', "'", "': '", '": "', " ", "  ", "\n",
    ",", ";", "&", "}", "]", ")", "abc", "The model", "sk-", "sk-abcdef12", "eyJhbGciOiJIUzI1NiJ9", ".", "-", "--", "_",
    "0123456789abcdef", "task:", "a" * 33, "a1" * 20, "://", "@", "/", "me:pw", "\u00e9", "1", "?", "\u212aey",
    "org-", "proj_", "?code=", "&sid=", " is ", "token was ", "password is ", "api key ", "wrong", "provided: ", "ab1",
)  # fmt: skip


def _by_definition(text: str) -> str:
    for pattern, replacement in _DEFINITION:
        text = re.sub(pattern, replacement, text)
    return text


def test_what_is_hidden_is_what_the_definition_says():
    rng = random.Random(1)
    for _ in range(20_000):
        text = "".join(rng.choices(_PIECES, k=rng.randint(1, 14)))
        assert hide(text) == _by_definition(text)


def test_a_text_that_is_searched_in_windows_is_hidden_as_a_whole_one(monkeypatch):
    monkeypatch.setattr(scrubbing, "_WINDOW", 1_024)
    monkeypatch.setattr(scrubbing, "_OVERLAP", 256)
    rng = random.Random(2)
    for _ in range(300):
        text = "".join(rng.choices(_PIECES, k=800))
        assert hide(text) == _by_definition(text)


@pytest.mark.parametrize("length", [40, 5_000, 40_000])
def test_a_secret_that_reaches_over_windows_is_hidden_as_a_whole(length):
    for secret in ("eyJ" + "0aB_" * length, "a1" * length, "password=" + "x/" * length, "Bearer " + "x/" * length):
        for before in (0, 14_330, 16_380, 16_390, 30_000):
            clean = hide(". " * (before // 2) + secret + " end")
            assert clean.endswith("*** end") and len(clean) < before + 40


@pytest.mark.parametrize("unit", ["a", "a-", "-", "4e", "eyJhbGciOi_-", "apikey", "a=", "apikey=", '"', " ", "key=x "])
@pytest.mark.parametrize("do", [hide, described])
def test_long_texts_take_linear_time(do, unit):
    assert too_steep(do, lambda size: unit * (size // len(unit)), (100, 1_000, 10_000, 100_000, 1_000_000)) is None


def test_long_texts_are_cut():
    assert scrub("x " * 5000) == "x " * (MAX_ERROR_CHARS // 2) + "..."
    assert scrub("x" * 500_000) == "x" * MAX_ERROR_CHARS + "..."


def test_nothing_is_left_of_a_secret_that_is_cut_where_nothing_sets_it_apart():
    for before in range(60):
        text = "data=" + "A1" * 2950 + "," + "x/" * 30 + "x" * before + "/" + "0123456789abcdef" * 3 + "/" + "x/" * 2000
        assert "01234" not in scrub(text)


@pytest.mark.parametrize("secret", ["0123456789abcdef" * 3, "http://me:pass-word-1@host", "password='pass-word-1'"])
@pytest.mark.parametrize("long_secret", ["eyJ" + "0aB_" * 400, "password=" + "x" * 1500])
def test_nothing_is_left_of_a_secret_wherever_a_long_text_is_cut(secret, long_secret):
    """What is hidden is long, so that what stands near the cut is among what is kept."""
    assert hide(secret) != secret
    for before in range(7_900, 8_010):
        text = (f"{long_secret} " * 9)[:before].rpartition(" ")[0]
        text += " " + "." * (before - len(text) - 1) + " " + secret + " more" * 1000
        clean = scrub(text)
        assert len(clean) <= MAX_ERROR_CHARS + 3 and clean.endswith("...")
        assert not any(part in clean for part in ("01234", "pass-", "me:"))
