"""Shows recorded token ids as texts, with the tokenizer of the policy's base model if it is on this machine.

Nothing is tokenised here: the ids are those that the engine sampled. Without the package `tokenizers` (the extra
`train` brings it), or if the base's files are not here, there are no texts, and the page shows the ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

_LONGEST_FILE = 64 << 20  # bytes
_WAITING = 6  # tokens of which a character may consist


def token_texts(base: str, ids: Sequence[int]) -> list[str] | None:
    """Return the text of each token, together the text of all; `None` if it cannot be known here.

    If a character consists of several tokens, the last one of them has it, and the others are empty.
    """
    path = Path(base) / "tokenizer.json"
    try:
        facts = path.stat()
    except OSError:
        return None
    tokenizer = _tokenizer(path, facts.st_mtime_ns) if facts.st_size <= _LONGEST_FILE else None
    return None if tokenizer is None else _texts(tokenizer, ids)


@lru_cache(maxsize=2)  # each may take a hundred megabytes
def _tokenizer(path: Path, _changed: int) -> Any:
    try:
        return import_module("tokenizers").Tokenizer.from_file(str(path))
    except ModuleNotFoundError:
        return None
    except Exception:  # the package raises bare `Exception` for files that it cannot read
        return None


def _texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    texts: list[str] = []
    start = 0  # of the window that is decoded
    done = 0  # tokens whose text is known
    for end in range(1, len(ids) + 1):
        # The window starts before what is new, because some tokenizers write a token differently when it comes first.
        before: str = tokenizer.decode(list(ids[start:done]), skip_special_tokens=False)
        text: str = tokenizer.decode(list(ids[start:end]), skip_special_tokens=False)
        if text.endswith("\ufffd") and end < len(ids) and end - done < _WAITING:
            texts.append("")  # a part of a character
            continue
        texts.append(text[len(before) :])
        start, done = done, end
    return texts
