"""Texts that make a careless regular expression slow."""

from __future__ import annotations

import importlib
import re
from typing import Any, NamedTuple

_parser: Any = importlib.import_module("re._parser")  # what `re` itself compiles from; no public one exists

_UNITS = (
    "a", "A", "0", "-", "_", "=", ":", ".", ",", "@", "/", "<", ">", "(", "[", "{", "*", "&", '"', "'", "`", "\\", " ",
    "\n", "\t", "\u00e9", "\u5fd8", "\u201c", "a-", "-a", "a.", "a@", "a/", "a=", "a:", "a ", "a\n", "1.", "1 ", "1-",
    "Aa ", "A. ", " \n", "\r\n", "://", "</", "{}", '"a" ', "\\u00", "deadbeef", "4e", "a1", "a1-", "apikey", "apikey=",
    "key", "eyJhbGciOi_-", "0123456789abcdef ", "data:", "a, ", "<a>", "\n- ", "#a",
)  # fmt: skip
_TAILS = ("", "!", "\u00e9", "\n!")


class HostileText(NamedTuple):
    """What stands in front, what is repeated, what stands behind."""

    lead: str
    unit: str
    tail: str
    as_bytes: bool

    def of_size(self, size: int) -> Any:
        """Return about so many characters, or bytes for an expression of bytes."""
        whole = self.lead + self.unit * (size // len(self.unit)) + self.tail
        return whole.encode("utf-8", "surrogatepass") if self.as_bytes else whole

    def __str__(self) -> str:
        return f"{self.lead!r} + {self.unit!r} * n + {self.tail!r}"


def hostile_texts(pattern: re.Pattern[Any]) -> list[HostileText]:
    """Return texts that could make an expression slow: usual ones, and ones made from its own repetitions."""
    texts = [("", unit, tail) for unit in _UNITS for tail in ("", "!")]
    for lead, unit in _repetitions(pattern):
        texts += [(lead, unit, tail) for tail in _TAILS]
        texts += [("", lead + unit, tail) for tail in _TAILS]
        texts += [("", unit, "!"), (lead, unit + " ", ""), ("", unit + "\n", "")]
    as_bytes = isinstance(pattern.pattern, bytes)
    return [HostileText(*text, as_bytes) for text in dict.fromkeys(texts)]


def _repetitions(pattern: re.Pattern[Any]) -> list[tuple[str, str]]:
    """For each repetition in an expression, a text that leads there and one that it repeats."""
    found: dict[tuple[str, str], None] = {}

    def walk(items: Any, lead: str) -> str:
        """Return `lead` and a text that `items` match, as far as nothing looks ahead or behind."""
        for op, value in items:
            match str(op):
                case "LITERAL":
                    lead += chr(value)
                case "NOT_LITERAL":
                    lead += "a" if chr(value) != "a" else "b"
                case "ANY":
                    lead += "a"
                case "IN":
                    lead += _one_of(value)
                case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                    least, most, body = value
                    unit = walk(body, lead)[len(lead) :]
                    if most > 8 and unit:
                        found[lead, unit] = None
                    lead += unit * min(least, 40)
                case "SUBPATTERN":
                    lead = walk(value[3], lead)
                case "ATOMIC_GROUP":
                    lead = walk(value, lead)
                case "ASSERT" | "ASSERT_NOT":
                    walk(value[1], lead if value[0] > 0 else "")
                case "BRANCH":
                    lead = min([walk(branch, lead) for branch in value[1]], key=len)
                case _:  # places and references match no text of their own
                    pass
        return lead

    whole = walk(_parser.parse(pattern.pattern, pattern.flags), "")
    return [*found, *([("", whole)] if whole else [])]


def _one_of(items: Any) -> str:
    """A character that a class matches, preferably one that other classes match too."""
    named = [(str(kind), value) for kind, value in items]
    negated = ("NEGATE", None) in named
    edges = [value if kind == "LITERAL" else value[0] for kind, value in named if kind in ("LITERAL", "RANGE")]
    return next(c for c in "a0-A. _\n!" + "".join(map(chr, edges)) if any(_fits(c, *each) for each in named) != negated)


def _fits(character: str, kind: str, value: Any) -> bool:
    if kind == "LITERAL":
        return ord(character) == value
    if kind == "RANGE":
        return value[0] <= ord(character) <= value[1]
    classes = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w", "NOT_DIGIT": r"\D", "NOT_SPACE": r"\S", "NOT_WORD": r"\W"}
    name = str(value).removeprefix("CATEGORY_")
    return kind == "CATEGORY" and re.fullmatch(classes[name], character) is not None
