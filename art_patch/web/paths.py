"""Ids in paths and forms: a run may have any text as its id, as its app chose it, and each link to it works.

In the path of a page `{id:any}` stands for an id. Browsers and proxies take `.` and `..` for steps up, also as `%2e`,
and browsers change the line ends of what is in a form. So links and forms have an id as `segment` writes it.
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

from starlette.convertors import Convertor, register_url_convertor

_DOTS = re.compile(r"~*\.{1,2}")


def segment(key: object) -> str:
    """Return an id as one part of a path."""
    text = str(key)
    return quote(f"~{text}" if _DOTS.fullmatch(text) else text, safe="", errors="replace")


def key_of(text: str) -> str:
    """Return the id that a path has, without its escapes. Databases refuse NUL, and no id has one."""
    key = text.replace("\0", "")
    return key[1:] if key[:1] == "~" and _DOTS.fullmatch(key) else key


def key_of_field(text: str) -> str:
    """Return the id that a field of a form has."""
    return key_of(unquote(text))


class _Any(Convertor[str]):
    regex = r"(?s:.*)"  # line ends, too

    def convert(self, value: str) -> str:
        return key_of(value)

    def to_string(self, value: str) -> str:
        return segment(value)


def use_ids() -> None:
    """Let paths of routes have `{id:any}`."""
    register_url_convertor("any", _Any())
