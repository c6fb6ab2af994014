"""MkDocs calls these functions: they add the generated pages, and point links into the repository at its home page.

Links in `docs/pages` are relative, so they work in a checkout and on a code host. Files outside `pages` are not part of
the site; their links become addresses of the repository.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))

from generated import pages

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(\.\.?/[^)#\s]*)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made from the code."""
    for name, text in pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the page with links to the repository's files as absolute addresses."""
    folder = posixpath.dirname(f"docs/pages/{page.file.src_uri}")

    def address(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[1]))
        if target.startswith("docs/pages/") or not (ROOT / target).exists():
            return found[1]  # MkDocs checks it
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"{config.repo_url.rstrip('/')}/{kind}/main/{target}"

    return LINK.sub(address, markdown)
