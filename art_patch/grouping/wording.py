"""Reduces a request to the words that make its task, in an order that does not depend on the phrasing.

**Masks** (`normalise`). The parts that differ between two requests for one task are replaced by `<time>`, `<id>`,
`<email>`, `<ip>` or `<name>`. Text is masked only if its shape is unmistakable. A short number, a product's name with a
number, or a version is usually part of the task, and merging two tasks does more harm than splitting one. So `#88123`
and `ORD-2026-00123` are masked; `order 4711`, `RTX-4090` and `RFC-2119` are not. A person's name is masked only where
nothing else can stand: after a greeting at the beginning, after a closing at the very end, and after "my name is".

**Words**. Two texts are one task if these words are equal. The texts may differ in case, punctuation, greetings,
courtesies and articles, and in the order of their two halves. They may not differ in a number, a name, a negation, a
preposition or any other word: one word is all that distinguishes "price of 3 plums" from "price of 4 plums", or
"cancel" from "change". Measures of the similarity of texts (rapidfuzz, MinHash) have no threshold for this: two texts
that differ in one entity are more similar than two texts of which one has a typo in three words.

Quoted or fenced text, and text after a colon, is material that the task works on. It is kept word for word: "translate:
thank you" and "translate: please" are different tasks, although both contain a courtesy.

**Typos** (`corrections`). A word may be a misspelling of another word if one slip separates them: a letter missing,
added, replaced, or swapped with its neighbour. It is corrected if it is 200 times rarer than the other word. Then
little harm is done even if it is a word of its own: of the runs that count as "contract", at most one in 200 said
"contact". It is also corrected if it occurs once and the other word at least five times, both are long, and their first
and last letters agree. If both words are frequent, neither is corrected. Names and material are never corrected.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
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


_MATERIAL = re.compile(r"(```.*|:\s.*|\"[^\"\n]*\"|“[^”\n]*”|`[^`\n]*`|(?<!\w)'[^'\n]*'(?!\w))", re.DOTALL)
_TOKEN = re.compile(r"\S+|\n")
_EDGES = ".,;:!?\u2026\"\u201c\u201d\u201e\u00ab\u00bb\u2018\u2019'`()[]{}"
_BRACKETS = frozenset("()[]{}")
_BULLETS = frozenset({"-", "\u2013", "\u2014", "\u2022"})
_APOSTROPHES = str.maketrans("", "", "'\u2019")

# Phrases that may be left out. Whole ones, because their words may matter elsewhere: "you call me", "I call you".
_FILLER = """
a, an, the, of, for
hi, hello, hey, dear, hi there, hello there, hey there, hi all, hi team, hello team, dear team, dear support,
hi support, hello support, dear support team, hi support team, hello support team, dear sir or madam, hi everyone,
hello everyone, greetings, good morning, good afternoon, good evening, good day, <name>
please, pls, plz, kindly, please help, please help me, can you please help, hope you are well, hope you are doing well,
i hope you are well, i hope you are doing well, i hope this finds you well, sorry to bother you
thanks, thank you, thx, ty, cheers, many thanks, thanks a lot, thank you so much, thank you very much, thanks so much,
thanks in advance, thank you in advance, much appreciated, appreciate it, appreciate your help, thanks for your help,
thank you for your help, any help is appreciated, any help would be appreciated
best <name>, regards, best regards, kind regards, warm regards, best wishes, sincerely, yours sincerely,
have a nice day, have a great day, have a good day, sent from my iphone, sent from my phone
can you, could you, would you, will you, can you please, could you please, would you please, can you help me,
could you help me, would you mind, i would like you to, id like you to, i need you to, i want you to,
i would like to, id like to, i want to, i wanted to, i need to, i was wondering if, i was wondering if you could,
i was wondering if you can, i wonder if you could, tell me, can you tell me, could you tell me, please tell me,
let me know, please let me know, do you know, quick question, i have a question, help me
um, uh, uhm, hmm, well, ok, okay, so, just, actually, basically
"""

_BY_FIRST: dict[str, list[tuple[str, ...]]] = defaultdict(list)
for _phrase in sorted({tuple(phrase.split()) for phrase in _FILLER.replace("\n", ",").split(",")} - {()}, key=len):
    _BY_FIRST[_phrase[0]].insert(0, _phrase)  # longest first

# Words that are capitalised because a courtesy begins with them, even if the full stop before is missing.
_OPENERS = {first for first, phrases in _BY_FIRST.items() if len(phrases[0]) > 1} | {"cheers", "regards"}

_MANY_STARTS = 8


class Word(NamedTuple):
    """A word of a task, in lower case and without punctuation at its ends."""

    text: str
    loose: bool  # whether it is wording, so that it may be misspelt or part of a filler; names and material are not


def words_of(masked: str) -> tuple[Word, ...]:
    """Return the words of a text that `masks.mask` has masked and whose upper and lower case is unchanged."""
    words: list[Word] = []
    for place, piece in enumerate(_MATERIAL.split(_with_closed_quotes(masked))):
        starts = not place  # a sentence starts here, so that a capital says nothing
        for token in _TOKEN.findall(piece):
            if token.isalnum() and token.isascii() and token == token.lower():  # most are
                words.append(Word(token, place % 2 == 0))
                starts = False
                continue
            if bare := _bare(token):
                loose = place % 2 == 0 and not _is_name(bare, starts)
                words.append(Word(bare.casefold().translate(_APOSTROPHES), loose))
            starts = token[-1] in ".!?,\n"
    return tuple(words)


def essence(words: Sequence[Word]) -> tuple[str, ...]:
    """Return the words that distinguish a task from others: without fillers, and rotated to a fixed start."""
    kept: list[str] = []
    place = 0
    while place < len(words):
        text, loose = words[place]
        skipped = _filler_at(words, place) if loose and text in _BY_FIRST else 0
        if not skipped:
            kept.append(text)
        place += skipped or 1
    # A text of courtesies alone is a task too: an agent that is greeted.
    return _from_fixed_start(kept) or tuple(word.text for word in words)


def _with_closed_quotes(text: str) -> str:
    """Return the text without opening quotation marks that are not closed on their line."""
    # From each unclosed mark the search for material would run to the end of the line, in quadratic time.
    if "“" not in text:
        return text
    lines = text.split("\n")
    for number, line in enumerate(lines):
        last = line.rfind("”") + 1
        lines[number] = line[:last] + line[last:].replace("“", "„")  # an edge of words as well
    return "\n".join(lines)


def _bare(token: str) -> str:
    if token in _BULLETS or token == "\n":
        return ""
    bare = token.strip(_EDGES)
    # Brackets and operators between numbers are words: `( 3 + 4 ) * 5`.
    return bare or (token if _BRACKETS.issuperset(token) else "")


def _is_name(word: str, starts: bool) -> bool:
    """Whether capitals mark the word as a name; at the start of a sentence, the first capital does not count."""
    if len(word) == 1 or word == word.lower() or word.lower() in _OPENERS:
        return False
    return not (starts and word[1:] == word[1:].lower())


def _filler_at(words: Sequence[Word], place: int) -> int:
    """Return the number of words of the longest filler that begins here; 0 if none does."""
    for phrase in _BY_FIRST[words[place].text]:
        found = words[place : place + len(phrase)]
        if all(word.loose for word in found) and tuple(word.text for word in found) == phrase:
            return len(phrase)
    return 0


def _from_fixed_start(words: list[str]) -> tuple[str, ...]:
    """Rotate the words to a start that all rotations share: "3 plums: price" becomes "price of 3 plums".

    A rotation keeps the relations of the words: "from 3 to 4" never becomes "from 4 to 3".
    """
    if not words:
        return ()
    counts = Counter(words)
    rarest = min(words, key=lambda word: (counts[word], word))
    if counts[rarest] > _MANY_STARTS:  # no person writes so, and to compare all rotations takes quadratic time
        return tuple(words)
    starts = [place for place, word in enumerate(words) if word == rarest]
    return tuple(min(words[start:] + words[:start] for start in starts))


# --- spelling ---

_SHORTEST = 2
_RARER = 200
_LONG = 5
_SEVERAL = 5


def corrections(counts: Mapping[str, int]) -> dict[str, str]:
    """Return misspelt word -> correct word, given how often each word occurs (see the module's docstring)."""
    words = {word: count for word, count in counts.items() if len(word) >= _SHORTEST and word.isalpha()}
    by_gap: dict[str, list[str]] = defaultdict(list)
    for word, count in words.items():
        if count >= _SEVERAL:
            for gapped in _gapped(word):
                by_gap[gapped].append(word)
    found: dict[str, str] = {}
    for word, count in words.items():
        near = {
            other
            for gapped in _gapped(word)
            for other in by_gap.get(gapped, ())
            if other != word
            and (count * _RARER <= words[other] or (count == 1 and _are_long_and_framed_alike(word, other)))
            and _is_one_slip(word, other)
        }
        if near:
            found[word] = min(near, key=lambda other: (-words[other], other))
    return {word: other for word, other in found.items() if other not in found}


def _gapped(word: str) -> set[str]:
    """Return the word, and the word without each one of its letters: words one slip apart share one of these."""
    return {word} | {word[:place] + word[place + 1 :] for place in range(len(word))}


def _is_one_slip(word: str, other: str) -> bool:
    if len(word) != len(other):
        return word in _gapped(other) or other in _gapped(word)
    unlike = [place for place in range(len(word)) if word[place] != other[place]]
    first, last = unlike[0], unlike[-1]
    swapped = last == first + 1 and word[first] == other[last] and word[last] == other[first]
    return first == last or swapped


def _are_long_and_framed_alike(word: str, other: str) -> bool:
    return min(len(word), len(other)) >= _LONG and word[0] == other[0] and word[-1] == other[-1]
