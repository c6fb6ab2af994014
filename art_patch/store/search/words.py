"""The words of messages, as the search index keeps them, and of what a person looks for.

A word is a run of letters and digits, in small letters and without accents, cut after `LONGEST` characters. A character
of Chinese, Japanese or Korean is a word of its own, because these languages put no spaces between words. The name of
a tool that an answer calls is a word that no text has. A call has words of `_MOST_BYTES` at most, its newest ones:
PostgreSQL keeps no more, and says nothing.

If these rules change, the words of existing entries cannot be deleted any more: also change `index.TABLE`, so that a
new index is made.
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

from art_patch.errors import ConfigError
from art_patch.types import JSON

LONGEST = 32  # characters of a word
_MOST_CHARACTERS = 200_000  # of a message: what stands behind them is not found
_MOST_BYTES = 500_000  # of a call's words
_LONGEST_TOOL = 200  # characters of a tool's word
_MOST_WORDS = 100  # of a query
_EAST = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
_WORD = re.compile(rf"[{_EAST}]|[^\W_{_EAST}]+")
_ITEM = re.compile(r'"([^"]*)"|(\S+)')
_TOOL = "\u2192"  # no letter, so no text has a word that begins with it


def words_of(text: str) -> list[str]:
    """Return the words of a text in their order."""
    if text.isascii():
        text = text.lower()
    else:
        apart = unicodedata.normalize("NFKD", text.casefold())
        text = unicodedata.normalize("NFC", "".join(one for one in apart if not unicodedata.combining(one)))
    return [word[:LONGEST] for word in _WORD.findall(text)]


def tool_word(name: str) -> str:
    """Return the word that says that a tool of this name was called."""
    return _TOOL + "\u00b7".join(words_of(name[:_MOST_CHARACTERS]))[:_LONGEST_TOOL]


def texts_of(message: JSON) -> list[str]:
    """Return the texts of a message: its content, its refusal, and names and arguments of the tools that it calls."""
    content: Any = message.get("content")
    parts = cast("list[Any]", content) if isinstance(content, list) else [{"text": content}]
    found = [_pairs(part).get("text") for part in parts] + [message.get("refusal")]
    for function in _functions(message):
        found += [function.get("name"), function.get("arguments"), function.get("input")]
    return [text[:_MOST_CHARACTERS] for text in found if isinstance(text, str) and text]


def index_words(messages: Sequence[JSON]) -> list[str]:
    """Return the words of a call's messages, each once, with those of the tools that they call."""
    found: dict[str, None] = {}
    left = _MOST_BYTES
    for message in reversed(messages):
        names = (function.get("name") for function in _functions(message))
        said = [tool_word(name) for name in names if isinstance(name, str)]
        for word in chain(said, chain.from_iterable(map(words_of, texts_of(message)))):
            if word not in found:
                if (left := left - len(word.encode())) < 0:
                    return list(found)
                found[word] = None
    return list(found)


class Wanted(NamedTuple):
    """What a call must say: all `words`, a word that begins with each of `beginnings`, and each of `phrases`."""

    words: tuple[str, ...] = ()
    beginnings: tuple[str, ...] = ()
    phrases: tuple[str, ...] = ()  # words with a space around each, in their order

    def is_in(self, messages: Iterable[JSON]) -> bool:
        """Return whether some messages have each phrase, in one text."""
        texts = [f" {' '.join(words_of(text))} " for message in messages for text in texts_of(message)]
        return all(any(phrase in text for text in texts) for phrase in self.phrases)


def wanted(query: str) -> Wanted:
    """Return what a person looks for: words, beginnings (`refu*`) and phrases (`"your refund"`); else `ConfigError`."""
    words: dict[str, None] = {}
    beginnings: list[str] = []
    phrases: list[str] = []
    for quoted, plain in _ITEM.findall(query):
        found = words_of(quoted or plain)
        if plain.endswith("*") and found:
            beginnings.append(found.pop())
        words |= dict.fromkeys(found)
        if len(found) > 1:  # such as an address or a number with hyphens, too
            phrases.append(f" {' '.join(found)} ")
    if len(words) + len(beginnings) > _MOST_WORDS:
        raise ConfigError(f"{query!r:.70} has more than {_MOST_WORDS} words; search for fewer")
    if not words and not beginnings:
        raise ConfigError(f"{query!r:.70} has no word to search for; give letters or digits")
    return Wanted(tuple(words), tuple(beginnings), tuple(phrases))


def _functions(message: JSON) -> list[JSON]:
    """Return the functions that a message calls, whatever shape a provider gave it."""
    calls: Any = message.get("tool_calls")
    given = [_pairs(call) for call in cast("list[Any]", calls)] if isinstance(calls, list) else []
    found = [_pairs(call.get("function") or call.get("custom")) for call in given]
    return [*found, _pairs(message.get("function_call"))]


def _pairs(value: Any) -> JSON:
    return cast("JSON", value) if isinstance(value, Mapping) else {}
