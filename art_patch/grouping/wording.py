"""The words that a task is made of, in an order that does not depend on how it is put.

Two texts word one task if these words are equal. So they may differ in case, punctuation, greetings, courtesies and
articles, and one may say its two halves the other way round. They may not differ in a number, a name, a negation, a
preposition or any other word, because a single word is all that tells "price of 3 plums" from "price of 4 plums" and
"cancel" from "change"; no similarity of whole texts can see that. (Hence no rapidfuzz or MinHash: a ratio of the texts
above a limit. In texts of usual length a pair that differs in one entity is more alike than a pair with a typo in three
words, so no limit parts them, and finding candidates takes an index that an equality does not need.)

What is quoted, fenced or follows a colon is material, not wording: "translate: thank you" is not "translate: please".
It is kept to the word.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

_MATERIAL = re.compile(r"(```.*|:\s.*|\"[^\"\n]*\"|“[^”\n]*”|`[^`\n]*`|(?<!\w)'[^'\n]*'(?!\w))", re.DOTALL)
_TOKEN = re.compile(r"\S+|\n")
_EDGES = ".,;:!?\u2026\"\u201c\u201d\u201e\u00ab\u00bb\u2018\u2019'`()[]{}"
_BRACKETS = frozenset("()[]{}")
_BULLETS = frozenset({"-", "\u2013", "\u2014", "\u2022"})
_APOSTROPHES = str.maketrans("", "", "'\u2019")

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
"""What may be said or left out. Whole phrases, because a word of them alone may matter: "you call me", "I call you"."""

_BY_FIRST: dict[str, list[tuple[str, ...]]] = defaultdict(list)
for _phrase in sorted({tuple(phrase.split()) for phrase in _FILLER.replace("\n", ",").split(",")} - {()}, key=len):
    _BY_FIRST[_phrase[0]].insert(0, _phrase)  # longest first

_OPENERS = {first for first, phrases in _BY_FIRST.items() if len(phrases[0]) > 1} | {"cheers", "regards"}
"""What is capitalised because a courtesy begins with it, where the full stop before it is missing."""

_MANY_STARTS = 8


class Word(NamedTuple):
    """A word of a task, in lower case.

    Attributes:
        text: without punctuation at its edges.
        loose: it is wording: it may be misspelt or be part of a filler. Names and material are not.
    """

    text: str
    loose: bool


def words_of(masked: str) -> tuple[Word, ...]:
    """Return the words of a text that `masks.mask` masked and that is still in its own case."""
    words: list[Word] = []
    for place, piece in enumerate(_MATERIAL.split(_with_closed_quotes(masked))):
        starts = not place  # a sentence starts here, so that a capital says nothing
        for token in _TOKEN.findall(piece):
            if token.isalnum() and token.isascii() and token == token.lower():  # most are
                words.append(Word(token, place % 2 == 0))
                starts = False
                continue
            bare = _bare(token)
            if bare:
                loose = place % 2 == 0 and not _is_name(bare, starts)
                words.append(Word(bare.casefold().translate(_APOSTROPHES), loose))
            starts = token[-1] in ".!?,\n"
    return tuple(words)


def essence(words: Sequence[Word]) -> tuple[str, ...]:
    """Return what tells the task from others: the words without fillers, from a start that the wording cannot move."""
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
    """The text without “ that nothing closes on its line: from each of them a search would look at the rest of it."""
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
    """Whether capitals say that the word names something; at the start of a sentence the first one says nothing."""
    if len(word) == 1 or word == word.lower() or word.lower() in _OPENERS:
        return False
    return not (starts and word[1:] == word[1:].lower())


def _filler_at(words: Sequence[Word], place: int) -> int:
    """How many words the longest filler has that begins here; 0 if none does."""
    for phrase in _BY_FIRST[words[place].text]:
        found = words[place : place + len(phrase)]
        if all(word.loose for word in found) and tuple(word.text for word in found) == phrase:
            return len(phrase)
    return 0


def _from_fixed_start(words: list[str]) -> tuple[str, ...]:
    """Rotate to a start that is the same for all rotations: "3 plums: price" is "price of 3 plums".

    A rotation keeps who does what to whom: "from 3 to 4" never becomes "from 4 to 3".
    """
    if not words:
        return ()
    counts = Counter(words)
    rarest = min(words, key=lambda word: (counts[word], word))
    if counts[rarest] > _MANY_STARTS:  # no text that people write
        return tuple(words)
    starts = [place for place, word in enumerate(words) if word == rarest]
    return tuple(min(words[start:] + words[:start] for start in starts))
