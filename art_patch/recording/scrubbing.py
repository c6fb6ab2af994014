"""Texts without what looks like a key, a token or a password.

Error texts always go through here. Headers and clients are never recorded and request fields go through an allow-list;
what users and models write is left as it is unless `redact="secrets"` is set.
"""

from __future__ import annotations

import re
from functools import cache

MAX_ERROR_CHARS = 2000
HIDDEN = "***"

_SECRETS = (
    (r"(?i)(://)[^/\s@'\"]+@", rf"\1{HIDDEN}@"),
    (r"(?i)\b(bearer|basic)\s+[^\s'\",;]+", rf"\1 {HIDDEN}"),
    (
        r"(?i)([\w-]*(?:api[_-]?key|access[_-]?key|secret|password|passwd|authorization|credential|signature)"
        r"[\w-]*|\b(?:key|token|sig|auth))(['\"]?\s*[:=]\s*['\"]?)(?!\s)(?:(?:bearer|basic)\s+)?[^\s'\",;&}\])]+",
        rf"\1\2{HIDDEN}",
    ),
    (r"\b(?:sk|pk|rk|hf|ghp|gho|xox[a-z]|AKIA|AIza)[-_]?[A-Za-z0-9*_-]{6,}", HIDDEN),
    (r"\beyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]+)*", HIDDEN),
    (r"\b(?=[A-Za-z_-]*\d)(?=[\d_-]*[A-Za-z])[A-Za-z0-9_-]{32,}\b", HIDDEN),
)


@cache
def _secrets() -> tuple[tuple[re.Pattern[str], str], ...]:
    # At the first use, not at import: `patch()` would wait for it, and few apps ever get here.
    return tuple((re.compile(pattern), replacement) for pattern, replacement in _SECRETS)


def hide(text: str) -> str:
    """Return `text` with secrets replaced by `***`."""
    for pattern, replacement in _secrets():
        text = pattern.sub(replacement, text)
    return text


def scrub(text: str) -> str:
    """Return an error's text with secrets replaced by `***`, cut to 2,000 characters."""
    text = hide(text)
    return text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + "..."


def described(error: BaseException | str | None) -> str | None:
    """Return what is kept of an error; a consumer that stops reading a generator ends it, which is none."""
    if error is None or isinstance(error, GeneratorExit):
        return None
    return scrub(error if isinstance(error, str) else f"{type(error).__name__}: {error}")
