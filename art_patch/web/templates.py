"""Makes HTML from the templates of this folder, and JSON from the same facts.

Everything recorded was written by strangers. The templates escape it for HTML, no template marks a text as safe, and
characters that change the direction of writing, or that nobody sees, are shown by their escapes. The pages hold no
script and no style of their own, so the browser is told to run none (`access.HEADERS`).

A run may have any text as its id, as its app chose it, and each link to it works. In the path of a page `{id:any}`
stands for an id. Browsers and proxies take `.` and `..` for steps up, also as `%2e`, and browsers change the line ends
of what is in a form. So links and forms have an id as `segment` writes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.convertors import Convertor, register_url_convertor
from starlette.responses import HTMLResponse, Response

from art_patch._lib import words

NO_VALUE = "-"
_DOTS = re.compile(r"~*\.{1,2}")


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,  # a fact that is misspelt must not look like one that is missing
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    filters: dict[str, Any] = {
        "ago": words.ago,
        "seconds": _or_none(words.seconds),
        "size": _or_none(words.size),
        "share": _or_none(words.share),
        "number": _or_none("{:,}".format),
        "score": _or_none("{:.2f}".format),
        "usd": words.usd,
        "moment": _or_none(partial(_written, form="%Y-%m-%d %H:%M:%S")),
        "iso": partial(_written, form="%Y-%m-%dT%H:%M:%S%z"),
        "offset": _offset_s,
        "zone": _zone,
        "sentences": words.sentences,
        "data": _finite_json,
        "segment": segment,
        "editable": _editable,
        "counted": words.counted,
        "short": _or_none("{:.4g}".format),
    }
    made.filters.update(filters)
    return made


def html(name: str, about: Mapping[str, Any], *, status: int = 200) -> Response:
    """Return the page of a template."""
    return HTMLResponse(_environment().get_template(f"{name}.html").render(about), status_code=status)


def json_response(facts: Mapping[str, Any]) -> Response:
    """Return facts as JSON; what is no finite number is `null`."""
    return Response(_finite_json(facts), media_type="application/json")


def _finite_json(value: Any) -> str:
    try:
        return json.dumps(value, default=_plain, allow_nan=False)
    except ValueError:  # JSON has no word for what is no finite number
        return json.dumps(json.loads(json.dumps(value, default=_plain), parse_constant=lambda _: None))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, set | frozenset | tuple) else str(value)


def _shown(value: Any) -> Any:
    if value is None:
        return NO_VALUE
    return value if isinstance(value, Markup) else words.visible(value)


def _or_none(words_of: Callable[[Any], str]) -> Callable[[Any], str | None]:
    def said(value: Any) -> str | None:
        return None if value is None else words_of(value)

    return said


def _offset_s(at: float) -> int:
    """Return by how many seconds the clock of this server, in whose zone all pages write, is ahead of UTC."""
    return int((datetime.fromtimestamp(at).astimezone().utcoffset() or timedelta()).total_seconds())


def _zone(at: float) -> str:
    minutes = _offset_s(at) // 60
    return f"UTC{'-' if minutes < 0 else '+'}{abs(minutes) // 60:02}:{abs(minutes) % 60:02}" if minutes else "UTC"


def _written(at: float, form: str) -> str:
    # An app, or an import, may have written a time that no calendar has, such as one in milliseconds.
    try:
        return datetime.fromtimestamp(at).astimezone().strftime(form)
    except (ValueError, OverflowError, OSError):
        return f"{at:g} s"


def _editable(value: object) -> Markup:
    """Return a text for a field in which it is edited: escaped, and each character as it is, so that it is kept so."""
    return escape(str(value).encode("utf-8", "replace").decode())


# --- ids ---


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
