"""What a change is asked with, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from art_patch.errors import ConfigError
from art_patch.web.projects import Project


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
        name = " ".join(self.form.get("who", "").split())[:100]
        if not name:
            raise ConfigError("say who you are: the ledger notes it")
        return name

    def who(self, what: str) -> str:
        """Return the person's name and the change, as the ledger notes them."""
        return f"{self.person} (art-patch web: {what})"


@dataclass(frozen=True, slots=True)
class Done:
    """What a change did, in words, and the page below the project that shows it; else it is the page of the form."""

    words: str
    then: str | None = None
