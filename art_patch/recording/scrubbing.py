"""Replaces keys, tokens and passwords in texts by `***`, as far as patterns recognise them.

Error texts are always scrubbed. Texts of users and models are scrubbed only with `redact="secrets"`. All patterns run
in linear time: a search holds the interpreter's lock, so a text that makes a pattern slow would stop the whole app.
"""

import re
from functools import cache, partial
from string import ascii_letters, digits

MAX_ERROR_CHARS = 2000
HIDDEN = "***"

_PIECE_CHARS = 64  # a secret that is cut in two begins in the last so many characters
_IN_SECRETS = f"{ascii_letters}{digits}._-+/=~"
# So much of an error is searched: more than is kept, because what is hidden may be long.
_SEARCHED_CHARS = 4 * MAX_ERROR_CHARS

_BEFORE_NAMES = (
    (r"(?i)(://)[^/\s@'\"]+@", rf"\1{HIDDEN}@"),
    (r"(?i)\b(bearer|basic)\s+[^\s'\",;]+", rf"\1 {HIDDEN}"),
)
_AFTER_NAMES = (
    (r"\b(?:sk|pk|rk|hf|ghp|gho|xox[a-z]|AKIA|AIza)[-_]?[A-Za-z0-9*_-]{6,}", HIDDEN),
    (r"\beyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]+)*", HIDDEN),
)
# With the look-behind, a word is tried once, and not again from each of its characters.
_NAMED = r"(?<![\w-])([\w-]+)['\"]?\s*[:=]\s*['\"]?(?!\s)"
_SECRET_NAME = (
    r"(?i)api[_-]?key|access[_-]?key|secret|password|passwd|authorization|credential|signature"
    r"|(?:^|-)(?:key|token|sig|auth)\Z"
)
_VALUE = r"(?i)(?:(?:bearer|basic)\s+)?[^\s'\",;&}\])]+"
_LONG_WORD = r"\b[A-Za-z0-9_-]{32,}\b"
_MIXED = r"(?=[A-Za-z_-]*\d)(?=[\d_-]*[A-Za-z])"


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    # At the first use, not at import: `patch()` would wait for it, and few apps ever need it.
    return re.compile(pattern)


def hide(text: str) -> str:
    """Return `text` with secrets replaced by `***`."""
    for pattern, replacement in _BEFORE_NAMES:
        text = _compiled(pattern).sub(replacement, text)
    text = _without_named(text)
    for pattern, replacement in _AFTER_NAMES:
        text = _compiled(pattern).sub(replacement, text)
    return _compiled(_LONG_WORD).sub(partial(_unless_plain, text), text)


def scrub(text: str) -> str:
    """Return the text of an error with secrets replaced by `***`, cut to 2,000 characters."""
    searched = text if len(text) <= _SEARCHED_CHARS else _cut(text)
    hidden = hide(searched)
    return hidden if searched is text and len(hidden) <= MAX_ERROR_CHARS else hidden[:MAX_ERROR_CHARS] + "..."


def described(error: BaseException | str | None) -> str | None:
    """Return the text to store for an error; `None` without an error, or if the reader of a generator stopped early."""
    if error is None or isinstance(error, GeneratorExit):
        return None
    return scrub(error if isinstance(error, str) else f"{type(error).__name__}: {error}")


def _cut(text: str) -> str:
    """Return the start of a long text, cut where no secret is cut in two: half a secret may not look like one."""
    most, least = _SEARCHED_CHARS, _SEARCHED_CHARS - MAX_ERROR_CHARS
    end = max(text.rfind(apart, least, most) for apart in " \t\r\n'\"")
    if end >= 0:
        return text[:end]
    # What is left of a longer secret is long enough to look like one.
    return text[: least - _PIECE_CHARS] + text[least - _PIECE_CHARS : least].rstrip(_IN_SECRETS) + HIDDEN


def _without_named(text: str) -> str:
    """Hide what follows a name such as `api_key` and a colon or an equals sign."""
    pieces: list[str] = []
    kept = 0  # `pieces` holds everything before
    for found in _compiled(_NAMED).finditer(text):
        # A value is skipped: it may hold the name of a secret itself.
        if found.start() < kept or not _compiled(_SECRET_NAME).search(found[1]):
            continue
        if value := _compiled(_VALUE).match(text, found.end()):
            pieces += text[kept : found.end()], HIDDEN
            kept = value.end()
    pieces.append(text[kept:])
    return "".join(pieces)


def _unless_plain(text: str, found: re.Match[str]) -> str:
    """Hide a long word of letters and digits."""
    # `_MIXED` is asked once for each whole word. Inside the pattern of words, it would be asked at each of their
    # characters.
    return HIDDEN if _compiled(_MIXED).match(text, found.start()) else found[0]
