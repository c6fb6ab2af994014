"""Which file of a package imports which, read from the source; late and typing-only imports count like any other.

A *folder* is a direct child of the package, as in `art_patch/store`. A *door* is a file that other folders may import:
the folder's `__init__.py`, and what `DOORS` lists.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import networkx

DOORS: Mapping[str, str] = {}
"""Folder -> the one file beside its `__init__` that other folders may import."""

SHELVES = frozenset({"_lib"})
"""Folders that are shelves of single tools, each imported by its own name."""


@dataclass(frozen=True)
class Import:
    """One name that one statement imports from the package.

    Attributes:
        importer: path of the importing file, relative to the package's parent directory.
        target: path of the imported file, likewise.
        line: line of the statement.
        late: whether the statement stands in a function.
    """

    importer: str
    target: str
    line: int
    late: bool


@dataclass(frozen=True)
class ImportGraph:
    """The imports inside one package directory."""

    package: Path

    @cached_property
    def files(self) -> Mapping[str, ast.Module]:
        """Path relative to the package's parent -> syntax tree, for every Python file."""
        paths = sorted(path for path in self.package.rglob("*.py") if "__pycache__" not in path.parts)
        return {path.relative_to(self.package.parent).as_posix(): ast.parse(path.read_text()) for path in paths}

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """Every import of one file of the package by another."""
        return tuple(found for path, tree in self.files.items() for found in self._imports_of(path, tree))

    @cached_property
    def edges(self) -> Mapping[str, frozenset[str]]:
        """File -> the other files that it imports."""
        targets: dict[str, set[str]] = {path: set() for path in self.files}
        for found in self.imports:
            targets[found.importer].add(found.target)
        return {path: frozenset(others - {path}) for path, others in targets.items()}

    def circles(self) -> list[list[str]]:
        """Return the groups of files that import one another, directly or not; each group sorted, largest first."""
        graph = networkx.DiGraph({path: list(others) for path, others in self.edges.items()})
        groups = [sorted(group) for group in networkx.strongly_connected_components(graph) if len(group) > 1]
        return sorted(groups, key=lambda group: (-len(group), group))

    def deep_imports(self) -> list[Import]:
        """Return the imports that reach into another folder past its doors, one for each statement and file."""
        deep = [
            found
            for found in self.imports
            if (folder := self.folder_of(found.target)) is not None
            and folder not in SHELVES
            and folder != self.folder_of(found.importer)
            and found.target not in (f"{self.package.name}/{folder}/__init__.py", DOORS.get(folder))
        ]
        return sorted({(i.importer, i.line, i.target): i for i in deep}.values(), key=lambda i: (i.importer, i.line))

    def folder_of(self, path: str) -> str | None:
        """Return the folder that a file lies in; `None` for a file of the package's root."""
        parts = path.split("/")
        return parts[1] if len(parts) > 2 else None

    def _imports_of(self, path: str, tree: ast.Module) -> Iterator[Import]:
        in_functions = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            for candidates in _imported(node):
                target = next((file for name in candidates if (file := self._file_of(name))), None)
                if target is not None and target != path:
                    yield Import(path, target, getattr(node, "lineno", 0), node in in_functions)

    def _file_of(self, name: str) -> str | None:
        """Return the file of a module; `None` if the name is no module of the package."""
        root = name.replace(".", "/")
        return next((path for path in (f"{root}.py", f"{root}/__init__.py") if path in self.files), None)


def _imported(node: ast.AST) -> Iterator[tuple[str, ...]]:
    """Yield what a statement, or a call of `import_module`, imports: dotted names, of which the first module counts."""
    if isinstance(node, ast.Import):
        yield from ((alias.name,) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        # `name` in `from package import name` is a module of its own, or something in the package's `__init__`.
        yield from ((f"{node.module}.{alias.name}", node.module) for alias in node.names)
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called == "import_module" and isinstance(node.args[0].value, str):
            yield (node.args[0].value,)
