"""The README and the pages of the documentation, as blocks of code and links that tests can check."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs/pages").rglob("*.md")))
GENERATED = {f"docs/pages/reference/{name}.md" for name in ("cli", "settings", "errors", "python-api", "metrics")}
"""Pages that exist only in the built site."""

CHECKED = {"python", "bash", "json"}
"""Languages that `tests/test_docs.py` checks. Diagrams and plain text are no code."""
NO_CODE = {"mermaid", "text", ""}

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)  # in a list, it is indented
_REASON = re.compile(r"Not run by the tests: (.+)")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: relative to the repository.
        line: number of its first line of code.
        reason: the page's own words, in the line before, why the block is not run; empty if it is.
    """

    page: str
    line: int
    language: str
    code: str
    reason: str

    @property
    def is_checked(self) -> bool:
        """Whether a test proves the block, and not only that it compiles."""
        return self.language in CHECKED and not self.reason


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the blocks of code of a page, in order."""
    text = page.read_text()
    for found in _FENCE.finditer(text):
        if found[2] not in NO_CODE:
            before = text[: found.start()].rstrip().splitlines()
            reason = _REASON.search(before[-1]) if before else None
            line = text.count("\n", 0, found.start()) + 2
            name = page.relative_to(ROOT).as_posix()
            yield Block(name, line, found[2], dedent(found[3]), reason[1] if reason else "")


def all_blocks() -> list[Block]:
    """Return the blocks of the README and of all pages."""
    return [block for page in PAGES for block in blocks_of(page)]


def commands(code: str) -> Iterator[list[str]]:
    """Yield the words of each simple command of a bash block, without variables set for it and redirections."""
    for line in code.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        redirected = False
        for word in [*lexer, ";"]:
            if set(word) <= set("|&;"):
                while words and re.match(r"\w+=", words[0]):
                    words.pop(0)
                if words:
                    yield words
                words = []
            elif set(word) <= set("<>"):
                redirected = True
            elif redirected:
                redirected = False
            else:
                words.append(word)


def slug(heading: str) -> str:
    """Return a heading's anchor, as code hosts and the site's generator both make it."""
    plain = re.sub(r"[`*]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading)).strip().lower()
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", plain))


def anchors(text: str) -> set[str]:
    """Return the anchors of a page."""
    return {slug(line) for line in re.findall(r"^#+ (.*)", _FENCE.sub("", text), re.MULTILINE)}


def links(text: str) -> list[str]:
    """Return the targets of a page's links, without those in blocks of code."""
    return re.findall(r"\]\(([^)\s]+)\)", _FENCE.sub("", text))
