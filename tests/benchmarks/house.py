"""How legible the package is: size, who imports whom, comments, repetition, documentation.

::

    python tests/benchmarks/house.py [--json] [--quick] [--list FIGURE]

With `--json` the last line of stdout is one object of named figures, with `missed` listing the targets that were not
met; without it, a table. `--list` prints what a figure counts, one place a line. Half a minute; `--quick` leaves
the cycle of `to_policy_files` out and takes seconds.

What is counted:

- `package_lines`: lines of every text file under `art_patch/`. `files`, `file_max_lines`: its Python files.
- `circles`: groups of files that import one another, directly or not. Late and typing-only imports count, and so does
  `import art_patch`. `deep_imports`: statements that import a file of another folder past its doors (see
  `tests/support/import_graph.py`).
- `comments_per_100`: lines with a comment in 100 lines of code; comments for tools (`noqa`, `pyright`, `fmt`) are none.
  `import_share`: lines of import statements in lines of code. Code: lines that hold a token which is neither a comment
  nor a docstring.
- `duplicates_literal`: pairs of places that share six or more lines of code, equal but for white space.
- `hollow_docstrings`: entries of a docstring's sections of at most three words, and docstrings that only refer the
  reader to the module.
- `readme_lines`: lines of README.md.
- `docs_blocks`: blocks of code in README.md and `docs/pages`. `docs_blocks_checked`: those of them that
  `tests/test_docs.py` runs (Python) or parses with the real command line (bash); it fails if one of them is wrong.
- `routed_call_files`: files of the package in which code runs in the app's process from the beginning of a routed
  streaming call to its end, on the caller's thread; `routed_call_files_with_writer`: those of the recorder's thread,
  up to the commit, and these. Imports and warm-up are done before.
- `to_policy_files`: files of the package in which code of the job runs from the beginning of a cycle, over a store with
  recorded traffic, to its promoted policy, the update's own process included. The cycle is real: stand-in judge over
  HTTP, embedded engine over HTTP, a training update, a gate that lets pass whatever it can score. Job, training and
  engine run in this one process, each as in a process of its own, and all its threads count. Files under
  `art_patch/demo` do not: they are the stand-in judge, which takes the place of a provider. Nor do those of `ENGINE`,
  which run in the server that answers the apps, too; `to_policy_files_with_engine` counts them. Imports are done
  before, by a first whole cycle, so a file that only an unusual cycle enters (a resumed update, a canary, a replay) is
  not among them.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import sys
import tempfile
import threading
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.benchmark_report import Target, finish, say  # noqa: E402 - the line above makes it importable
from tests.support.docs_pages import all_blocks  # noqa: E402
from tests.support.import_graph import ImportGraph  # noqa: E402

PACKAGE = ROOT / "art_patch"

TARGETS = [
    Target("package_lines", None, 50_000, "lines under the package"),
    Target("files", None, 330, "Python files"),
    Target("file_max_lines", None, 400, "lines of the longest file"),
    Target("circles", None, 0, "groups of files that import one another"),
    Target("deep_imports", None, 0, "imports past a folder's doors"),
    Target("comments_per_100", 6, None, "lines with a comment in 100 lines of code"),
    Target("import_share", None, 0.09, "lines of imports in lines of code"),
    Target("duplicates_literal", None, 5, "pairs of places with six equal lines"),
    Target("hollow_docstrings", None, 0, "entries and docstrings that say nothing"),
    Target("readme_lines", None, 200, "lines of README.md"),
    Target("docs_blocks_checked", len(all_blocks()), None, "blocks of the documentation that tests check: all"),
    Target("routed_call_files", None, 24, "files of a routed streaming call, up to the queue"),
    Target("routed_call_files_with_writer", None, 40, "the same with the recorder's thread"),
    Target("to_policy_files", None, 80, "files of the job in a cycle, from traffic to a promoted policy"),
]

ENGINE = ("art_patch/serving/embedded/", "art_patch/serving/server.py", "art_patch/serving/request_checks.py")
"""Where code of the engine's server runs, which is `art-patch serve` and no part of the job."""

CYCLE_LISTS = ("to_policy_files", "to_policy_files_with_engine")

SAME_LINES = 6
COMMON_LINE_FILES = 8
"""A run of lines that stands in more files than this is a shared shape, such as a list of imports, and no copy."""

HOLLOW_WORDS = 3

TOOL_COMMENTS = ("# noqa", "# pyright:", "# type:", "# fmt:")

_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


class Source:
    """One Python file, read once.

    Attributes:
        path: relative to the repository.
        tree: its syntax tree.
        code_lines: numbers of the lines that hold code.
        comment_lines: numbers of the lines that hold a comment for readers.
    """

    def __init__(self, file: Path) -> None:
        """Read and tokenize the file."""
        self.path = file.relative_to(ROOT).as_posix()
        text = file.read_text()
        self.lines = text.splitlines()
        self.tree = ast.parse(text)
        docstrings = {
            line for node in _documented(self.tree) for line in range(node.body[0].lineno, _end(node.body[0]) + 1)
        }
        self.code_lines: set[int] = set()
        self.comment_lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and not token.string.startswith((*TOOL_COMMENTS, "#!")):
                self.comment_lines.add(token.start[0])
            elif token.type not in _NO_CODE:
                self.code_lines.update(range(token.start[0], token.end[0] + 1))
        self.code_lines -= docstrings


def _documented(tree: ast.AST) -> Iterator[Any]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            yield node


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def import_lines(source: Source) -> int:
    """Return how many lines the import statements of a file take."""
    found = [node for node in ast.walk(source.tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return len({line for node in found for line in range(node.lineno, _end(node) + 1)})


def literal_duplicates(sources: list[Source]) -> list[str]:
    """Return the pairs of places that share at least six lines of code; imports do not count."""
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for source in sources:
        imports = {
            line
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for line in range(node.lineno, _end(node) + 1)
        }
        numbers = [n for n in sorted(source.code_lines - imports) if len(source.lines[n - 1].strip()) > 1]
        for i in range(len(numbers) - SAME_LINES + 1):
            window = numbers[i : i + SAME_LINES]
            places[tuple(source.lines[n - 1].strip() for n in window)].append((source.path, window[0]))
    first: dict[tuple[str, str], tuple[int, int]] = {}
    for found in places.values():
        if len({path for path, _ in found}) > COMMON_LINE_FILES:
            continue
        for (path, line), (other, there) in combinations(sorted(found), 2):
            if path != other or there - line >= SAME_LINES:
                first.setdefault((path, other), (line, there))
    return [f"{path}:{line} {other}:{there}" for (path, other), (line, there) in sorted(first.items())]


SECTIONS = ("Args:", "Attributes:", "Raises:", "Returns:", "Yields:")


def hollow_docstrings(source: Source) -> list[str]:
    """Return the places of a file's docstrings that say nothing."""
    found: list[str] = []
    for node in _documented(source.tree):
        text = ast.get_docstring(node) or ""
        name = f"{source.path}:{node.body[0].lineno}"
        if text.strip().rstrip(".").lower() in ("see the module", "see module", "see above"):
            found.append(f"{name} {text.strip()}")
        found += [f"{name} {entry}" for entry in _entries(text) if len(entry.split(":", 1)[1].split()) <= HOLLOW_WORDS]
    return found


def _entries(docstring: str) -> list[str]:
    """Return the `name: words` entries of a Google-style docstring's sections, each in one line."""
    entries: list[str] = []
    section = False
    for line in docstring.splitlines():
        indent = len(line) - len(line.lstrip())
        if not line.strip():
            continue
        if indent == 0:
            section = line.strip() in SECTIONS
        elif section and indent == 4 and ":" in line:
            entries.append(line.strip())
        elif section and entries:
            entries[-1] += " " + line.strip()
    return [entry for entry in entries if ":" in entry]


class Trace:
    """Notes in which of the package's files code runs, while `on`, in this thread and in those that start meanwhile."""

    def __init__(self) -> None:
        """Note nothing yet."""
        self.on = False
        self.callers: set[str] = set()
        self.others: set[str] = set()
        self._me = threading.get_ident()

    def __enter__(self) -> Trace:
        """Have every call looked at; threads that run already are not."""
        threading.settrace(self._saw)
        sys.settrace(self._saw)
        return self

    def __exit__(self, *_: object) -> None:
        """Look no more."""
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type] - it takes None, whatever its types say

    # A tracer that returns None hears of a function's call alone; a profiler would hear of every return, too.
    def _saw(self, frame: FrameType, event: str, _: object) -> None:
        if self.on and event == "call" and (name := frame.f_code.co_filename).startswith(f"{PACKAGE}{os.sep}"):
            files = self.callers if threading.get_ident() == self._me else self.others
            files.add(Path(name).relative_to(ROOT).as_posix())


def routed_call() -> tuple[set[str], set[str]]:
    """Return the files of a routed streaming call: on the caller's thread, and on this or the recorder's."""
    import openai

    import art_patch
    from art_patch.store import open_store
    from tests.support.servers import serving

    def call() -> None:
        messages: Any = [{"role": "user", "content": "hi"}]
        with client.chat.completions.create(model="gpt-x", messages=messages, stream=True) as stream:
            for _ in stream:
                pass

    with tempfile.TemporaryDirectory() as directory, serving() as upstream, serving() as engine, Trace() as trace:
        url = f"sqlite:///{directory}/store.db"
        store = open_store(url, project="default")
        store.ledger.add_base("agent", "base", "0" * 64, who="house")
        store.ledger.set_engine(engine.url, who="house")
        with (
            art_patch.patch(store=url),
            openai.OpenAI(api_key="k", base_url=upstream.url, max_retries=0) as client,
        ):
            call()  # what only a first call does is no part of a call
            assert art_patch.flush(30)
            trace.on = True
            call()
            callers = set(trace.callers)
            assert art_patch.flush(30)
            trace.on = False
            served = art_patch.status().served_by_policy
        store.close()
    if served != 2:
        raise SystemExit(f"{served} of 2 calls were routed")
    return callers, callers | trace.others


def cycle() -> set[str]:
    """Return the files of a cycle that promotes what it trained."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, which reads it once
    from art_patch.demo.judge import STAND_IN_MODEL, serve_stand_in_judge
    from art_patch.rewards import Judge
    from art_patch.serving import EmbeddedEngine
    from tests.support.cycles import Place, eager, is_short
    from tests.support.engines import serve
    from tests.support.tiny import make_tiny_model

    with tempfile.TemporaryDirectory() as name, Trace() as trace, serve_stand_in_judge(is_short) as url:
        directory = Path(name)
        base = make_tiny_model(directory / "base", hidden=32, vocab_size=320)
        judge = Judge(STAND_IN_MODEL, base_url=url, api_key="none")
        with serve(EmbeddedEngine.from_pretrained(base, adapters_root=directory / "adapters")) as running:
            place = Place(directory, base, running.client)
            for seed, is_traced in enumerate((False, True)):
                place.traffic(f"agent@{seed}", seed=seed)
                trace.on = is_traced
                report = place.cycle(judge, eager())
                trace.on = False
                if (report.outcome, place.champion) != ("promoted", f"agent@{seed + 1}"):
                    raise SystemExit(f"no policy was promoted: {report}")
            place.store.close()
    return {path for path in trace.callers | trace.others if not path.startswith("art_patch/demo/")}


def measure(*, quick: bool) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return the figures, and what each of them counts."""
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    lines = {path.relative_to(ROOT).as_posix(): _lines(path) for path in files}
    python = {path: number for path, number in lines.items() if path.endswith(".py")}
    sources = [Source(ROOT / path) for path in sorted(python)]
    code = sum(len(source.code_lines) for source in sources)
    graph = ImportGraph(PACKAGE)
    say("tracing a routed call")
    callers, with_writer = routed_call()
    blocks = all_blocks()
    lists: dict[str, list[str]] = {
        "circles": [" ".join(circle) for circle in graph.circles()],
        "deep_imports": [f"{found.importer}:{found.line} {found.target}" for found in graph.deep_imports()],
        "duplicates_literal": literal_duplicates(sources),
        "hollow_docstrings": [place for source in sources for place in hollow_docstrings(source)],
        "routed_call_files": sorted(callers),
        "routed_call_files_with_writer": sorted(with_writer),
    }
    if not quick:
        say("tracing a cycle")
        with_engine = cycle()
        lists["to_policy_files"] = sorted(path for path in with_engine if not path.startswith(ENGINE))
        lists["to_policy_files_with_engine"] = sorted(with_engine)
    figures: dict[str, Any] = {
        "package_lines": sum(lines.values()),
        "files": len(python),
        "file_max_lines": max(python.values()),
        "comments_per_100": 100 * sum(len(source.comment_lines) for source in sources) / code,
        "import_share": sum(map(import_lines, sources)) / code,
        "readme_lines": _lines(ROOT / "README.md"),
        "docs_blocks": len(blocks),
        "docs_blocks_checked": sum(block.is_checked for block in blocks),
        **{name: len(places) for name, places in lists.items()},
    }
    lists["file_max_lines"] = [f"{number} {path}" for path, number in sorted(python.items(), key=lambda item: -item[1])]
    return figures, lists


def _lines(path: Path) -> int:
    try:
        return len(path.read_text().splitlines())
    except UnicodeDecodeError:
        return 0  # a picture or the like


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--list", metavar="FIGURE", help="print what that figure counts")
    parser.add_argument("--quick", action="store_true", help="leave out the cycle")
    arguments = parser.parse_args()
    figures, lists = measure(quick=arguments.quick or arguments.list not in (None, *CYCLE_LISTS))
    if arguments.list is None:
        finish(figures, TARGETS, as_json=arguments.json)
    elif arguments.list in lists:
        print(*lists[arguments.list], sep="\n")
    else:
        parser.error(f"--list: choose from {', '.join(sorted({*lists, *CYCLE_LISTS}))}")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # `| head` has read enough; what is left in the buffer must not be written at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
