"""Which calls are ours, by the user's word: a glob, an expression or a function. Compiled once, asked for each call."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

from art_patch._lib.faults import faults
from art_patch.settings import Match

Matches = Callable[[Mapping[str, Any]], bool]


def compile_match(match: Match) -> Matches | None:
    """Return the question that a request's body answers; `None` if every call is ours.

    A pattern looks at the model that the app asks for: a glob must fit the whole name, an expression any part of it.
    """
    if match is None:
        return None
    if isinstance(match, str):
        glob = not match.startswith("re:")
        match = re.compile(fnmatch.translate(match) if glob else match[3:])
    if isinstance(match, re.Pattern):
        search = match.search
        return lambda body: search(cast(str, body.get("model") or "")) is not None
    chooses = match

    def ask(body: Mapping[str, Any]) -> bool:
        try:
            return bool(chooses(MappingProxyType(cast(dict[str, Any], body))))
        except Exception as error:  # the user's function; what it cannot judge is left alone
            faults.trouble("match", error)
            return False

    return ask
