"""Watches every SQL statement of this process's stores: each one has to name the project whose rows it reads or writes.

`scoping.py` does that for every statement that SQLAlchemy compiles. What is written by hand, or on the tables of
`tables.whole`, is found here, and so is whatever a later change lets slip through.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from sqlalchemy import Engine, event

from art_patch.store.schema import tables

ABOUT_ALL_PROJECTS = ("art_patch/store/maintain.py",)
"""Modules whose statements are about the whole store on purpose."""

_LIMITED = "|".join(name for name, table in tables.metadata.tables.items() if "project_id" in table.c)
_SUBQUERY = re.compile(rf'\(SELECT \* FROM "?({_LIMITED})"? WHERE "?\1"?\.project_id = \d+\)')
_NAMED = re.compile(rf'(?:FROM|JOIN|UPDATE|,)\s+"?({_LIMITED})"?(?![\w."=])', re.IGNORECASE)
_INSERT = re.compile(rf'INSERT INTO "?({_LIMITED})"? \(([^)]*)\)', re.IGNORECASE)


def unlimited(statement: str) -> set[str]:
    """The tables of which the statement reads or writes rows without saying of which project."""
    rest = _SUBQUERY.sub("(SELECT)", statement)
    found = {name for name, columns in _INSERT.findall(rest) if "project_id" not in columns}
    for name in _NAMED.findall(_INSERT.sub("", rest)):
        # By name, or the only table of the statement.
        if not re.search(rf'("?{name}"?\.|\s)project_id = ', rest):
            found.add(name)
    return found


class Watch:
    """Collects such statements while it is on."""

    def __init__(self) -> None:
        self.seen = 0
        self.found: list[tuple[set[str], str]] = []

    def on(self) -> None:
        event.listen(Engine, "before_cursor_execute", self._look)

    def off(self) -> None:
        event.remove(Engine, "before_cursor_execute", self._look)

    def _look(self, connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if getattr(connection.engine.dialect.statement_compiler, "__name__", "") != "ForProject":
            return  # a test's own engine
        self.seen += 1
        if statement.lstrip().startswith(("CREATE ", "PRAGMA ")):
            return
        bad = unlimited(statement)
        if bad and not _may_be_unlimited():
            self.found.append((bad, statement))


def _may_be_unlimited() -> bool:
    """Whether a test sends the statement itself, or a module that is about all projects."""
    files: list[str] = []
    frame: Any = sys._getframe(2)
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    sender = next(file for file in files if "sqlalchemy" not in file and not file.endswith("contextlib.py"))
    return "/tests/" in sender or any(file.endswith(ABOUT_ALL_PROJECTS) for file in files)
