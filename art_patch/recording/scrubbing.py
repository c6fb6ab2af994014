"""Replaces keys, tokens and passwords in texts by `***`, as far as patterns recognise them.

Error texts are always scrubbed. Texts of users and models are scrubbed only with `redact="secrets"`. All patterns run
in linear time, and search a long text in windows: a search holds the interpreter's lock, so a single one over a long
text would stop the whole app. Between two windows other threads run.
"""

import re
from functools import cache
from io import StringIO
from string import ascii_letters, digits
from typing import NamedTuple

MAX_ERROR_CHARS = 2000
HIDDEN = "***"

_PIECE_CHARS = 64  # a secret that is cut in two begins in the last so many characters
_IN_SECRETS = f"{ascii_letters}{digits}._-+/=~"
# So much of an error is searched: more than is kept, because what is hidden may be long.
_SEARCHED_CHARS = 4 * MAX_ERROR_CHARS

_WINDOW = 16_384
# What stands before a secret and the secret's first characters, wherever they begin in a window, lie in this one or the
# next as a whole, if they are no longer than this.
_OVERLAP = 2_048


class _Rule(NamedTuple):
    """One kind of secret: an expression for its beginning and what stands before, and one for the rest of it.

    `keeps` is a group of `begins`: what is before its end stays. `named`: what the first group must contain. `looks`:
    what the text from the beginning on must match.
    """

    begins: str
    goes_on: str
    becomes: str = HIDDEN
    keeps: int | None = None
    named: str | None = None
    looks: str | None = None


_SECRET_NAME = (
    r"(?i)api[_-]?key|access[_-]?key|secret|password|passwd|authorization|credential|signature"
    r"|(?:^|-)(?:key|token|sig|auth)\Z"
)
_MIXED = r"(?=[A-Za-z_-]*\d)(?=[\d_-]*[A-Za-z])"
_TASK = r"(?<=\btask:)[0-9a-f]{32}"
_CALLED = r"(?:pass(?:word|wd|phrase|code)|secret|api[ _-]?key|token)"
_SAID = r"[^\s'\",;]*[^\s'\",;.:!?)\]}]"
_NO_SECRET = (
    "an?|already|also|bad|being|blank|deprecated|disabled|empty|expired|for|from|in|inactive|incorrect|invalid|malformed|"
    "missing|mandatory|necessary|needed|neither|never|no|none|not|now|null|of|only|optional|out|required|revoked|set|"
    "still|that|the|to|too|undefined|unknown|unset|valid|wrong"
)

_RULES = (
    _Rule(r"(?i)(://)[^/\s@'\"]+@", "", f"{HIDDEN}@", keeps=1),
    _Rule(r"(?i)\b(bearer|basic)\s+(?=[^\s'\",;])", r"[^\s'\",;]+", f" {HIDDEN}", keeps=1),
    # With the look-behind, a word is tried once, and not again from each of its characters.
    _Rule(
        r"(?<![\w-])([\w-]+)['\"]?\s*[:=]\s*['\"]?(?!\s)",
        r"(?i)(?:(?:bearer|basic)\s+)?[^\s'\",;&}\])]+",
        keeps=0,
        named=_SECRET_NAME,
    ),
    _Rule(r"\b(?:sk|pk|rk|hf|ghp|gho|xox[a-z]|AKIA|AIza)[-_]?[A-Za-z0-9*_-]{6}", r"[A-Za-z0-9*_-]*"),
    _Rule(r"\beyJ[A-Za-z0-9_-]{8}", r"[A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+)*"),
    # But not the hash that names a task: `grouping` computes it, so it is no secret, and logs are read by it.
    _Rule(rf"\b(?!{_TASK}(?![\w-]))[A-Za-z0-9_-]{{32}}", r"[A-Za-z0-9_-]*\b", looks=_MIXED),
    _Rule(r"\b(?:org-|proj_)(?=[A-Za-z]{0,32}\d)[A-Za-z0-9]{8}", r"[A-Za-z0-9]*\b"),
    _Rule(r"(?i)[?&](?:code|ticket|session|sid|pass|pwd)=", r"[^\s'\",;&}\])]+", keeps=0),
    # "API key abc1 is wrong", and "the password is swordfish", but not "the password is wrong".
    _Rule(rf"(?i)\b{_CALLED}\s{{1,4}}['\"]?{_MIXED}", _SAID, keeps=0),
    _Rule(
        rf"(?i)\b{_CALLED}(?:\s{{1,4}}(?:provided|given|used|sent))?(?:\s{{1,4}}(?:is|was)|\s{{0,4}}:)\s{{1,4}}"
        rf"['\"]?(?!(?:{_NO_SECRET})\b)",
        _SAID,
        keeps=0,
    ),
)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    # At the first use, not at import: `patch()` would wait for it, and few apps ever need it.
    return re.compile(pattern)


def hide(text: str) -> str:
    """Return `text` with secrets replaced by `***`."""
    for rule in _RULES:
        text = _applied(rule, text)
    return text


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


def _applied(rule: _Rule, text: str) -> str:
    begins, goes_on = _compiled(rule.begins), _compiled(rule.goes_on)
    clean = StringIO()  # joining hundreds of thousands of pieces would be one long call
    kept = at = 0  # `clean` holds everything before `kept`
    while at < len(text):
        sure = len(text) if len(text) - at <= _WINDOW else at + _WINDOW - _OVERLAP
        found = begins.search(text, at, at + _WINDOW)
        if found is None or found.start() >= sure:
            at = sure
            continue
        at = found.end()
        if rule.named and not _compiled(rule.named).search(found[1]):
            continue
        rest = goes_on.match(text, at, at + _WINDOW)
        if rest is None:
            continue
        # What is hidden is skipped: a value may hold the name of a secret itself. And a word is looked at once.
        at = rest.end()
        # One less, because a dot at the end of a window counts only with what follows it.
        while rest and rest.end() - rest.start() >= _WINDOW - 1:
            rest = goes_on.match(text, at, at + _WINDOW)
            at = rest.end() if rest else at
        if not rule.looks or _compiled(rule.looks).match(text, found.start(), found.start() + _WINDOW):
            clean.write(text[kept : found.start() if rule.keeps is None else found.end(rule.keeps)] + rule.becomes)
            kept = at
    if not kept:
        return text
    clean.write(text[kept:])
    return clean.getvalue()
