"""Masks the parts that differ between two requests for one task, as `<time>`, `<id>`, `<email>`, `<ip>` or `<name>`.

Text is masked only if its shape is unmistakable. A short number, a product's name with a number, or a version is
usually part of the task, and merging two tasks does more harm than splitting one. So `#88123` and `ORD-2026-00123` are
masked; `order 4711`, `RTX-4090` and `RFC-2119` are not.

A person's name is masked only where nothing else can stand: after a greeting at the beginning, after a closing at the
very end, and after "my name is". Elsewhere a name may be what the task is about.
"""

import re
import unicodedata
from collections.abc import Callable
from typing import NamedTuple

# White space is `\s` everywhere, and only ASCII is matched, so that normalising a normalised text changes nothing.
_FLAGS = re.IGNORECASE | re.ASCII

_MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sep(?:t(?:ember)?)?"
    r"|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\b\.?"
)
_DAY = r"(?:0?[1-9]|[12]\d|3[01])(?:st|nd|rd|th)?"
_YEAR = r"(?:19|20)\d\d"
_WEEKDAY = r"\b(?:mon|tue(?:s)?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?\b\.?"
_ZONE = r"(?:utc|gmt|cet|cest|[ecmp][sd]t)"
_OCTET = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"

_DATES = (
    r"\d{4}-\d\d-\d\d(?:[t\s]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:z|[+-]\d\d:?\d\d)?)?(?!\w)",
    rf"{_YEAR}[/.]\d\d?[/.]\d\d?(?!\w)",
    rf"\d\d?[/.-]\d\d?[/.-]{_YEAR}(?!\w)",
    r"\d\d?/\d\d?/\d\d(?!\w)",
    rf"{_DAY}\s+(?:of\s+)?{_MONTH}(?:,?\s*{_YEAR}(?!\w))?",
    rf"{_MONTH}\s+{_DAY}(?!\w)(?:,?\s+{_YEAR}(?!\w))?",
    rf"{_MONTH}\s+{_YEAR}(?!\w)",
    r"(?:[01]?\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:[.,]\d+)?)?(?:\s*[ap]\.?m\b\.?)?(?![\w:])",
    r"(?:1[0-2]|0?[1-9])\s*[ap]\.?m\b\.?",
)

_ID_PREFIXES = frozenset(
    ("ord", "order", "inv", "invoice", "tkt", "ticket", "case", "ref", "req", "rma", "cust", "acc", "acct", "txn",
     "trx", "po", "bk", "pnr", "inc", "shp", "usr", "user", "id")
)  # fmt: skip
_PUBLISHED = frozenset(
    ("iso", "iec", "din", "en", "ieee", "rfc", "cve", "cwe", "kb", "bs", "astm", "ansi", "nist", "ecma")
)
_AFTER_LABEL = re.compile(
    r"\b(?:orders?|tickets?|invoices?|cases?|bookings?|reservations?|tracking|accounts?|customers?|references?|ref"
    r"|requests?|shipments?|parcels?|transactions?|policy|claims?|incidents?|serial|id|confirmation)"
    r"(?:\s+(?:number|num|no|nr|id|code))?\.?\s*(?:[:#]\s*)?(?:is\s+)?\Z",
    _FLAGS,
)
_LABEL_LENGTH = 40

_IN_URL = re.compile(r"(?<=[/=?&#])[^/?&=#<>]*(?:\d{4}|[0-9a-f]{12})[^/?&=#<>]*", _FLAGS)


def _url(match: re.Match[str]) -> str:
    """Mask ids in an address; its host and words are the task."""
    scheme, rest = match[0].split("//", 1)
    return f"{scheme}//{_IN_URL.sub('<id>', rest)}"


def _prefixed(match: re.Match[str]) -> str:
    """Mask `ORD-123` and `PROJ-12345`; leave the product `RTX-4090` and the standard `ISO-27001`."""
    prefix, digits = match[1].lower(), len(match[2])
    is_id = prefix in _ID_PREFIXES or (digits >= 5 and not match[3] and prefix not in _PUBLISHED)
    return "<id>" if is_id else match[0]


def _labelled(match: re.Match[str]) -> str:
    """Mask the number in `order number 12345`; `12345` alone may be a price."""
    before = match.string[max(0, match.start() - _LABEL_LENGTH) : match.start()]
    return "<id>" if _AFTER_LABEL.search(before) else match[0]


class _Rule(NamedTuple):
    """A pattern with its mask, and what a text must hold for the search to be worth its time."""

    needle: str  # a substring that the text must contain
    digits: int  # the text must contain so many consecutive digits
    pattern: re.Pattern[str]
    mask: str | Callable[[re.Match[str]], str]


_VOLATILE = tuple(
    _Rule(needle, digits, re.compile(pattern, _FLAGS), becomes)
    for needle, digits, pattern, becomes in (
        ("://", 1, r"\bhttps?://(?:<id>|[^\s<>\"'()\[\]])+", _url),
        ("@", 0, r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+", "<email>"),
        ("-", 1, r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "<id>"),
        ("", 1, rf"(?<![\w.,:/-])(?:{'|'.join(_DATES)})", "<time>"),
        ("<time>", 0, rf"<time>(?:,?\s+(?:at\s+|-\s+)?<time>)*(?:\s*\b{_ZONE}\b)?", "<time>"),
        ("<time>", 0, rf"{_WEEKDAY},?\s+<time>", "<time>"),
        (".", 1, rf"(?<![\w.])(?<!version\s)(?:{_OCTET}\.){{3}}{_OCTET}(?::\d+)?(?!\w|\.\d)", "<ip>"),
        (":", 1, r"(?<![\w:])(?:[0-9a-f]{1,4}:){3,7}:?[0-9a-f]{1,4}(?![\w:])", "<ip>"),
        ("+", 2, r"(?<!\w)\+\d{1,3}[\s.-]?(?:\(\d+\)[\s.-]?)?\d{2,}(?:[\s.-]\d{2,}){1,4}(?!\w)", "<id>"),
        ("", 4, r"(?<!\w)(?:\(\d{3}\)\s*|\d{3}[.-])\d{3}[.-]\d{4}(?!\w)", "<id>"),
        ("", 3, r"\b([a-z]{2,7})[-_](?:\d{2,4}[-_])?(\d{3,})([-_][a-z0-9]{1,4})?\b", _prefixed),
        ("#", 4, r"(?<!\w)#\s?[a-z]{0,3}-?\d{4,}\b", "<id>"),
        ("", 5, r"(?<!\w)[a-z]{0,3}-?\d{5,}(?!\w|[.,]\d)", _labelled),
        ("_", 1, r"\b[a-z]{2,6}_(?=[a-z]*\d)[a-z0-9]{10,}\b", "<id>"),
        ("", 1, r"\b(?:0x)?(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,}\b", "<id>"),
        ("", 1, r"\b(?=(?:[a-z]*\d){4})(?=\d*[a-z])[a-z0-9]{12,}\b", "<id>"),
        ("-", 4, r"\b\d{4}(?:-\d{4}){3}\b", "<id>"),
        ("", 7, r"\b\d{7,}\b", "<id>"),
        ("<id>", 0, r"\b(?:number|num|no|nr|id|code)\b\.?\s*(?::\s*)?<id>", "<id>"),
    )
)
_DIGITS = re.compile(r"[0-9]+")

_UPPER = r"[A-ZÀ-ÖØ-Þ]"
_NAME = (
    rf"(?:(?:Mr|Mrs|Ms|Dr|Prof)\.?\s+)?(?:{_UPPER}\.\s*)*"
    rf"{_UPPER}[\w'\u2019-]*(?:\s+{_UPPER}[\w'\u2019-]*\.?){{0,2}}"
)
_HELLO = r"(?i:hi|hello|hey|dear|good\s+(?:morning|afternoon|evening|day))"
_BYE = r"(?i:(?:best|kind|warm)\s+(?:regards|wishes)|regards|best|thanks|thank\s+you|thx|cheers|sincerely)"
_AT_THE_END = (
    re.compile(rf"(\b{_BYE}[,!.\s\u2013\u2014-]+){_NAME}(?=[.\s]*\Z)"),
    re.compile(rf"(\n[^\S\n]*[-\u2013\u2014]\s*){_NAME}(?=[.\s]*\Z)"),
)
_STARTS_IN_CAPITALS = re.compile(rf"[.\s]*[\w'\u2019-]*?{_UPPER}")
_ELSEWHERE = (
    ("", re.compile(rf"(\A\s*{_HELLO}[\s,]+){_NAME}(?=\s*[,!.:\n]|\s+[\u2013\u2014-])")),
    ("y name", re.compile(rf"((?i:\bmy\s+name\s+is|\bmy\s+name['\u2019]s)\s+){_NAME}")),
    ("his is", re.compile(rf"((?i:\bthis\s+is)\s+){_NAME}(?=\s+(?:from|calling|speaking|again|here)\b)")),
)


def mask(text: str) -> str:
    """Return the text in Unicode form NFKC with its variable parts masked; upper and lower case are kept."""
    text = unicodedata.normalize("NFKC", text)
    # Backwards: a forward search for a name at the end would start at every capital, in quadratic time.
    if _STARTS_IN_CAPITALS.match(text[::-1]):
        for pattern in _AT_THE_END:
            text = pattern.sub(r"\1<name>", text)
    for needle, pattern in _ELSEWHERE:
        if needle in text:
            text = pattern.sub(r"\1<name>", text)
    return _masked(text)


def normalise(text: str) -> str:
    """Return the text masked, in lower case and with single spaces. Applied twice, it gives the same result as once."""
    return one_spelling(mask(text))


def one_spelling(masked: str) -> str:
    """Return a masked text in lower case and with single spaces, masked again until nothing changes."""
    text, before = " ".join(masked.casefold().split()), None
    # Until nothing changes: a mask may leave a text that an earlier pattern matches.
    while before != text:
        before, text = text, _masked(text)
    return text


def _masked(text: str) -> str:
    longest = max(map(len, _DIGITS.findall(text)), default=0)
    for rule in _VOLATILE:
        if rule.digits <= longest and rule.needle in text:
            text = rule.pattern.sub(rule.mask, text)
    return text
