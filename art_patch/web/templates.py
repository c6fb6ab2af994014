"""Makes HTML from the templates of this folder, and JSON from the same facts.

Everything recorded was written by strangers. The templates escape it for HTML, no template marks a text as safe, and
characters that change the direction of writing, or that nobody sees, are shown by their escapes. The pages hold no
script and no style of their own, so the browser is told to run none (`access.HEADERS`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.responses import HTMLResponse, Response

from art_patch._lib import words
from art_patch.web.paths import segment

NO_VALUE = "-"


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
        "moment": _or_none(_moment),
        "iso": _iso,
        "offset": _offset_s,
        "zone": _zone,
        "sentences": words.sentences,
        "data": _data,
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


def _moment(at: float) -> str:
    return _written(at, "%Y-%m-%d %H:%M:%S")


def _iso(at: float) -> str:
    return _written(at, "%Y-%m-%dT%H:%M:%S%z")


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


def _data(value: Any) -> str:
    """Return a value as JSON for an attribute, which the template escapes."""
    return _finite_json(value)
