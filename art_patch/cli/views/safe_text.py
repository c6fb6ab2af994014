"""Recorded text on a terminal: shown, never obeyed.

Whoever talks to an agent decides what is recorded. An escape sequence in it could rename the window, hide what follows
or answer for the user, and a change of direction could make a text read as another one. So every such character is
shown as its escape, and texts reach rich as `Text`, whose brackets are no markup.
"""

from __future__ import annotations

import re

# C0 without tab and newline, DEL, C1, marks and overrides of direction, line separators, halves of surrogate pairs.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def visible(text: object) -> str:
    """Return the text with all that a terminal would act on as an escape: a backslash, `x` and `1b`."""
    return _UNSAFE.sub(lambda found: _escape(found[0]), str(text).replace("\r\n", "\n"))


def one_line(text: object) -> str:
    """Return `visible` text without line breaks and tabs."""
    return " ".join(visible(text).split())


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
