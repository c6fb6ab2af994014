"""An inbox in one SQLite file, and full-text search over it. Standard library only.

- A search finds mails that have all of its words, in sender, subject or body, the newest first; of words, not of
  operators: whatever a model writes is a search, never a syntax error.
- Mails are numbered in the order in which they came; `m017` is what they are called.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HITS = 5
"""Lines that a search returns."""

_TABLES = """
CREATE TABLE emails (id INTEGER PRIMARY KEY, sent TEXT, sender TEXT, subject TEXT, body TEXT);
CREATE VIRTUAL TABLE words USING fts5 (sender, subject, body, content = 'emails', content_rowid = 'id');
CREATE TRIGGER added AFTER INSERT ON emails BEGIN
  INSERT INTO words (rowid, sender, subject, body) VALUES (new.id, new.sender, new.subject, new.body);
END;
"""


@dataclass(frozen=True)
class Email:
    """A mail; `sent` is an ISO date, and may have a time."""

    sent: str
    sender: str
    subject: str
    body: str


class Inbox:
    """Mails that can be searched and read."""

    def __init__(self, path: str | Path = ":memory:") -> None:
        """Open what is there, or begin an empty one."""
        self._rows = sqlite3.connect(path)
        if not self._rows.execute("SELECT 1 FROM sqlite_master WHERE name = 'emails'").fetchone():
            self._rows.executescript(_TABLES)

    @classmethod
    def existing(cls, path: Path) -> Inbox:
        """Open an inbox that is there.

        Raises:
            FileNotFoundError: it is not.
        """
        if not path.is_file():
            raise FileNotFoundError(f"there is no inbox {path}; synthetic.py and enron.py make one")
        return cls(path)

    def add(self, emails: Iterable[Email]) -> None:
        """Take mails in, in the order in which they came."""
        with self._rows:
            self._rows.executemany(
                "INSERT INTO emails (sent, sender, subject, body) VALUES (?, ?, ?, ?)",
                ((each.sent, each.sender, each.subject, each.body) for each in emails),
            )

    def search(self, query: str) -> list[tuple[int, Email]]:
        """Return the newest mails that have all words of the query, each with its number."""
        words = re.findall(r"\w+", query)
        if not words:
            return []
        found = self._rows.execute(
            "SELECT id, sent, emails.sender, emails.subject, emails.body FROM words JOIN emails ON id = words.rowid "
            "WHERE words MATCH ? ORDER BY id DESC LIMIT ?",
            (" ".join(f'"{word}"' for word in words), HITS),
        )
        return [(row[0], Email(*row[1:])) for row in found]

    def read(self, number: int) -> Email | None:
        """Return the mail of this number, if there is one."""
        if number >= 2**63:  # SQLite has no such number, a model may
            return None
        row = self._rows.execute("SELECT sent, sender, subject, body FROM emails WHERE id = ?", (number,)).fetchone()
        return Email(*row) if row else None

    def __len__(self) -> int:
        """How many mails there are."""
        return self._rows.execute("SELECT count(*) FROM emails").fetchone()[0]

    def close(self) -> None:
        """Let go of the file."""
        self._rows.close()


def label(number: int) -> str:
    """What a mail is called."""
    return f"m{number:03d}"


def number_of(label: str) -> int | None:
    """The number in a label, however it is written: `m017`, `M17`, `17`."""
    digits = re.fullmatch(r"\s*[mM]?(\d+)\s*", label, re.ASCII)
    return int(digits[1]) if digits else None
