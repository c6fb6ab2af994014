"""Error texts without what looks like a key, a token or a password.

Only error texts need this: headers and clients are never recorded, and request fields go through an allow-list.
"""

from __future__ import annotations

import re

MAX_ERROR_CHARS = 2000
HIDDEN = "***"

_SECRETS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?i)(://)[^/\s@'\"]+@"), rf"\1{HIDDEN}@"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[^\s'\",;]+"), rf"\1 {HIDDEN}"),
    (
        re.compile(
            r"(?i)([\w-]*(?:api[_-]?key|access[_-]?key|secret|password|passwd|authorization|credential|signature)"
            r"[\w-]*|\b(?:key|token|sig|auth))(['\"]?\s*[:=]\s*['\"]?)(?!\s)(?:(?:bearer|basic)\s+)?[^\s'\",;&}\])]+"
        ),
        rf"\1\2{HIDDEN}",
    ),
    (re.compile(r"\b(?:sk|pk|rk|hf|ghp|gho|xox[a-z]|AKIA|AIza)[-_]?[A-Za-z0-9*_-]{6,}"), HIDDEN),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]+)*"), HIDDEN),
    (re.compile(r"\b(?=[A-Za-z_-]*\d)(?=[\d_-]*[A-Za-z])[A-Za-z0-9_-]{32,}\b"), HIDDEN),
)


def scrub(text: str) -> str:
    """Return `text` with secrets replaced by `***`, cut to 2,000 characters."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + "..."
