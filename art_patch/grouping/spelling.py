"""Typos, told from words by how often they occur.

A word may be a misspelling of another if one slip of the finger makes it of the other: a letter left out, put in,
exchanged or swapped with its neighbour. It is taken for one if

- it is so much rarer that little harm is done if it is a word of its own: of the runs that say "contract" at most one
  in two hundred can be one that said "contact";
- or it occurs once, the other several times, both are long, and they begin and end alike. That is what few runs can
  tell, and of words like these few are one slip apart.

Where both words are in use, neither is corrected. Names and material never are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

_SHORTEST = 2
_RARER = 200
_LONG = 5
_SEVERAL = 5


def corrections(counts: Mapping[str, int]) -> dict[str, str]:
    """Return misspelt word -> word.

    Args:
        counts: how often each word occurs. The time that this takes grows with their number alone.
    """
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
    """The word, and the word without one of its letters: words one slip apart have one of these in common."""
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
