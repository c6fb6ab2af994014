"""Limits every statement of a store's connections to the rows of its project, when the statement is compiled.

A table in FROM becomes `(SELECT * FROM calls WHERE project_id = 3) AS calls`, in every subquery, join and alias; both
databases merge it into the query around it. UPDATE and DELETE get the condition in their WHERE. The columns' defaults
give an INSERT its project. So no query can forget its project, and none has to name it. These are not limited:

- the tables of `tables.whole`, for what concerns the whole store (`verify`, sizes), and `projects`, the list of them;
- SQL that is written as text: the writer's statements (`rows.py`) and the route, which name the project themselves.
"""

from collections.abc import Callable
from typing import Any

from sqlalchemy import Dialect, literal_column

from art_patch.store.schema import tables


def limit_to_project(dialect: Dialect, project_id: Callable[[], int]) -> None:
    """Make `dialect` compile statements for this project. When its id changes, clear the engine's compiled cache."""
    # On our own dialect: a hook of SQLAlchemy itself would change the statements of the app's engines, too.
    plain: Any = dialect.statement_compiler

    class ForProject(plain):
        def visit_table(self, table: Any, **kw: Any) -> str:
            name = super().visit_table(table, **kw)
            if not kw.get("asfrom") or kw.get("iscrud") or not _is_limited(table):
                return name
            inner = f"(SELECT * FROM {name} WHERE {name}.project_id = {project_id()})"
            alias = kw.get("enclosing_alias")
            return inner if alias is not None and alias.element is table else f"{inner} AS {name}"

        def visit_update(self, update_stmt: Any, **kw: Any) -> str:
            return super().visit_update(_limited(update_stmt, project_id()), **kw)

        def visit_delete(self, delete_stmt: Any, **kw: Any) -> str:
            return super().visit_delete(_limited(delete_stmt, project_id()), **kw)

    dialect.statement_compiler = ForProject


def _is_limited(table: Any) -> bool:
    return table.metadata is tables.metadata and "project_id" in table.c


def _limited(statement: Any, project_id: int) -> Any:
    table = statement.table
    return statement.where(table.c.project_id == literal_column(str(project_id))) if _is_limited(table) else statement
