"""What a change is asked with, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from art_patch._lib.words import visible
from art_patch.errors import ConfigError
from art_patch.web.paths import key_of_field
from art_patch.web.projects import Project

_FILLERS = frozenset(" \u115f\u1160\u3164\uffa0")  # letters that look like a space


@dataclass(frozen=True, slots=True)
class Acting:
    """A change that a browser asks for: the project, the ids in the path, and the form."""

    project: Project
    ids: Mapping[str, str]
    form: Mapping[str, str]
    now: float

    @property
    def person(self) -> str:
        """The person's name, as the form has it."""
        return self.text("who", "say who you are: the ledger notes it", most=100)

    def key(self, field: str) -> str:
        """Return the id that a field has, as `paths.segment` wrote it."""
        return key_of_field(self.form.get(field, ""))

    def text(self, field: str, missing: str | None = None, *, most: int = 2_000) -> str:
        """Return one line of the form, of characters that people see; `ConfigError` says `missing` if there is none."""
        line = " ".join(self.form.get(field, "").split())[:most]
        if visible(line) != line or not (line.isprintable() and set(line) - _FILLERS):
            line = ""
        if not line and missing is not None:
            raise ConfigError(missing)
        return line

    def who(self, what: str) -> str:
        """Return the person's name and the change, as the ledger notes them."""
        return f"{self.person} (art-patch web: {what})"


@dataclass(frozen=True, slots=True)
class Done:
    """What a change did, in words, and the page below the project that shows it; else it is the page of the form."""

    words: str
    then: str | None = None


def message_of(text: str) -> Any:
    """Return what a person wrote as JSON; `ConfigError` if it is none, or nested deeper than records are kept."""
    try:
        return from_json(text)
    except ValueError as error:
        raise ConfigError(f"the answer is not JSON ({error})") from None
