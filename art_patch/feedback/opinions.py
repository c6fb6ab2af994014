"""What a person says about a run: a score or a correction, checked, cleaned and stored.

The feedback server and the web page both keep opinions here. `ConfigError` says what is wrong with an opinion.
"""

from __future__ import annotations

import math
from typing import Any

from art_patch.errors import ConfigError
from art_patch.recording import Redactor
from art_patch.store import Store
from art_patch.types import Correction, Score

LONGEST_COMMENT = 2_000  # characters


class TooLong(ConfigError):
    """A comment has more than `LONGEST_COMMENT` characters."""


def value_of(name: str, given: Any) -> float:
    """Return the value of a score: `thumbs` takes 0 or 1, `reward` 0 to 1, any other name -1 to 1."""
    try:
        value = float(given) if isinstance(given, int | float | str) else math.nan
    except (ValueError, OverflowError):
        value = math.nan
    lowest = 0.0 if name in ("thumbs", "reward") else -1.0
    # NaN is in no range.
    if not lowest <= value <= 1.0 or (name == "thumbs" and value not in (0.0, 1.0)):
        wanted = "0 or 1" if name == "thumbs" else f"a number from {lowest:g} to 1"
        raise ConfigError(f"The value must be {wanted}.")
    return value


def comment_of(given: Any) -> str | None:
    """Return a comment without white space around it; `None` if there is none."""
    if given is None:
        return None
    if not isinstance(given, str):
        raise ConfigError("The comment must be a text.")
    text = given.replace("\r\n", "\n").strip()  # forms send CRLF, JSON of apps mostly LF
    if len(text) > LONGEST_COMMENT:
        raise TooLong(f"That is too long; {LONGEST_COMMENT:,} characters can be kept.")
    return text or None


def keep_opinion(store: Store, opinion: Score | Correction, redact: Redactor | None) -> bool:
    """Store the opinion, cleaned by `redact`, and return whether the store holds the run that it is about."""
    # A click must not bring back a user whose data was erased.
    if not store.read.known([opinion.trajectory_id]):
        return False
    store.write([opinion if redact is None else redact(opinion)])
    return True
