"""Draws passages of the documentation and of public docstrings, for readers who have never seen the project.

::

    python tests/benchmarks/passages.py [--seed TEXT] [--count N] [--json]

Half of the passages come from the README, CONTRIBUTING, the pages and the folders' READMEs, the other half from public
docstrings. Each is given to a reader alone, without its file, and the reader says what it means; somebody who knows the
code then says whether that is right. The seed is the commit's hash unless given, so a draw cannot be chosen.

A passage of a page is a paragraph, an item of a list with the sentence that introduces the list, or a row of a table
with the table's heading. A passage of the code is the docstring of a public class or function with the line that
defines it, or a paragraph of a module's docstring with the module's name and its first line. Without `--json` the
passages are printed one below the other; with it, the last line of stdout is one object with `seed`, `population` and
`passages`.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.docs_pages import PAGES  # noqa: E402 - the line above makes it importable

MIN_WORDS = 6
"""Shorter passages are headings in disguise; they hardly say anything that could be misread."""


def documents() -> list[Path]:
    """Return the README, CONTRIBUTING, the pages and the READMEs of folders."""
    folders = [path for part in ("art_patch", "examples", "integrations") for path in (ROOT / part).rglob("README.md")]
    return sorted({*PAGES, ROOT / "CONTRIBUTING.md", *folders})


def of_a_page(text: str) -> Iterator[str]:
    """Yield a page's paragraphs, items and rows, without headings, pictures and blocks of code."""
    text = re.sub(r"^(```|~~~).*?^\1\s*$", "", text, flags=re.DOTALL | re.MULTILINE)
    introduction = ""
    for block in re.split(r"\n\s*\n", text):
        lines = [line for line in block.strip().splitlines() if not line.startswith(("#", "![", "<"))]
        if not lines:
            continue
        if lines[0].startswith("|"):
            yield from ("\n".join([lines[0], row]) for row in lines[2:])
            continue
        first, *items = _ITEM.split("\n" + "\n".join(lines))
        if first := first.strip():
            yield first
            # A list is read below the sentence that ends with a colon; without such a sentence its items stand alone.
            introduction = re.split(r"(?<=[.!?])\s+", first)[-1] if first.endswith(":") else ""
        yield from (f"{introduction}\n- {item.strip()}".strip() for item in items)


_ITEM = re.compile(r"\n\s*(?:[-*]|\d+\.) ")


def of_a_module(path: Path) -> Iterator[str]:
    """Yield the paragraphs of a module's docstring, and the docstrings of its public classes and functions."""
    name = path.relative_to(ROOT).with_suffix("").as_posix().removesuffix("/__init__").replace("/", ".")
    if any(part.startswith("_") and part != "_lib" for part in name.split(".")):
        return
    tree = ast.parse(path.read_text())
    first, *others = re.split(r"\n\s*\n", ast.get_docstring(tree) or "")
    for paragraph in [first, *(f"{first}\n\n{other}" for other in others)]:
        yield f"module {name}\n\n{paragraph}"
    yield from _definitions(tree)


def _definitions(scope: ast.AST, owner: str = "") -> Iterator[str]:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            if docstring := ast.get_docstring(node):
                if isinstance(node, ast.ClassDef):
                    line = f"class {node.name}"
                else:
                    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
                    line = f"def {owner}{node.name}({ast.unparse(node.args)}){returns}"
                yield f"{line}\n\n{docstring}"
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node, f"{owner}{node.name}.")


def draw(seed: str, count: int) -> tuple[list[str], dict[str, int]]:
    """Return `count` passages, half of them from pages and half from code, and how many of each there are."""
    pages = [passage for path in documents() for passage in of_a_page(path.read_text())]
    code = [passage for path in sorted((ROOT / "art_patch").rglob("*.py")) for passage in of_a_module(path)]
    pools = {"pages": pages, "code": code}
    chosen: list[str] = []
    chance = random.Random(seed)
    for number, pool in zip((count - count // 2, count // 2), pools.values(), strict=True):
        chosen += chance.sample([passage for passage in pool if len(passage.split()) >= MIN_WORDS], number)
    return chosen, {name: len(pool) for name, pool in pools.items()}


def main() -> None:
    """Draw and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", help="the commit's hash unless given")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    arguments = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    seed = arguments.seed or commit.strip()
    if not seed:
        parser.error("--seed: no commit was found here, so name a seed")
    passages, population = draw(seed, arguments.count)
    if arguments.json:
        print(json.dumps({"seed": seed, "population": population, "passages": passages}))
    else:
        for number, passage in enumerate(passages, 1):
            print(f"--- {number}\n{passage}\n")


if __name__ == "__main__":
    main()
