"""What a person may change in the browser, as the commands of the same names do, with the same words in the ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

    def who(self, what: str) -> str:
        """Return the person's name, as the form has it, and the change, as the ledger notes them."""
        name = " ".join(self.form.get("who", "").split())[:100]
        if not name:
            raise ConfigError("say who you are: the ledger notes it")
        return f"{name} (art-patch web: {what})"


@dataclass(frozen=True, slots=True)
class Action:
    """One change: a path below the project, and the function that makes it and returns what it did, in words."""

    path: str
    act: Callable[[Acting], str]


ACTIONS: tuple[Action, ...] = ()
