"""Finds the words that make a task, in an order that does not depend on the phrasing, and corrects typos.

Two texts are one task if these words are equal. The texts may differ in case, punctuation, greetings, courtesies and
articles, and in the order of their two halves. They may not differ in a number, a name, a negation, a preposition or
any other word: one word is all that distinguishes "price of 3 plums" from "price of 4 plums", or "cancel" from
"change". Measures of the similarity of texts (rapidfuzz, MinHash) have no threshold for this: two texts that
differ in one entity are more similar than two texts of which one has a typo in three words.

Quoted or fenced text, and text after a colon, is material that the task works on. It is kept word for word: "translate:
thank you" and "translate: please" are different tasks, although both contain a courtesy.

**Typos** (`corrections`). A word may be a misspelling of another word if one slip separates them: a letter missing,
added, replaced, or swapped with its neighbour. It is corrected if it is 200 times rarer than the other word. Then
little harm is done even if it is a word of its own: of the runs that count as "contract", at most one in 200 said
"contact". It is also corrected if it occurs once and the other word at least five times, both are long, and their first
and last letters agree. If both words are frequent, neither is corrected. Names and material are never corrected.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

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
