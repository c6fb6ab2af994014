"""The app's statements, as the database's driver takes them: text and rows of plain values.

SQLAlchemy writes each statement once for the dialect. Its own `executemany` would handle every value of every row
again, which costs as much as SQLite itself. So a row is a tuple in the order of `columns`, JSON already text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Dialect, Table, bindparam, case, func, literal_column, or_, update
from sqlalchemy.dialects import postgresql, sqlite

from art_patch.store.schema import tables

Row = tuple[Any, ...]

TRAJECTORY = ("id", "origin", "started_at", "ended_at", "last_call_at", "name", "scenario_key", "group_key",
              "session_id", "user_id", "tags", "metadata", "error")  # fmt: skip
SPAN = ("id", "trajectory_id", "parent_id", "name", "started_at", "ended_at", "kind", "attributes", "error")
SCORE = ("id", "trajectory_id", "name", "value", "source", "at", "comment", "group_id", "rubric", "judge")
CORRECTION = ("id", "trajectory_id", "call_id", "at", "source", "message", "comment")
APP = ("id", "at", "facts")
NODE = ("id", "parent", "body")
BLOCK = ("id", "parent", "ids")
BLOB = ("id", "body")
CALL = ("id", "trajectory_id", "span_id", "started_at", "duration_ms", "ttft_ms", "requested_model", "policy",
        "prompt", "tools", "params", "prompt_token_ids", "prompt_tokens", "completion_tokens", "status", "error",
        "fallback", "untrainable", "api", "shadow_of", "prompt_block")  # fmt: skip
CHOICE = ("call_id", "index", "answer", "finish_reason", "token_ids", "logprobs")


class Statements:
    """Made for one dialect; each method runs one statement for all rows, nothing if there is none."""

    def __init__(self, dialect: Dialect) -> None:
        """Write the statements."""
        self._sqlite = dialect.name == "sqlite"
        kind: Any = type(dialect)
        self._dialect: Dialect = kind(paramstyle="qmark" if self._sqlite else "format")
        # A batch written twice (its first commit was not confirmed) leaves one copy.
        self._nodes = self._insert(tables.nodes, NODE)
        self._blocks = self._insert(tables.token_blocks, BLOCK)
        self._blobs = self._insert(tables.blobs, BLOB)
        self._calls = self._insert(tables.calls, CALL)
        self._choices = self._insert(tables.choices, CHOICE)
        self._spans = self._replace(tables.spans, SPAN, "ended_at", "attributes", "error")
        self._scores = self._replace(tables.scores, SCORE, *SCORE[2:])
        self._corrections = self._replace(tables.corrections, CORRECTION, *CORRECTION[2:])
        self._apps = self._replace(tables.apps, APP, "at", "facts")
        self._trajectories = self._upsert_trajectory()
        self._ends = self._text(_set_last_call(), ("at", "id", "at"))

    def nodes(self, connection: Connection, rows: Sequence[Row]) -> None:
        """Insert messages that are not there yet."""
        _run(connection, self._nodes, rows)

    def blocks(self, connection: Connection, rows: Sequence[Row]) -> None:
        """Insert blocks of prompt ids that are not there yet."""
        _run(connection, self._blocks, rows)

    def blobs(self, connection: Connection, rows: Sequence[Row]) -> None:
        """Insert lists of tools that are not there yet."""
        _run(connection, self._blobs, rows)

    def calls(self, connection: Connection, rows: Sequence[Row]) -> None:
        """Insert calls that are not there yet."""
        _run(connection, self._calls, rows)

    def choices(self, connection: Connection, rows: Sequence[Row]) -> None:
        """Insert answers that are not there yet."""
        _run(connection, self._choices, rows)

    def trajectories(self, connection: Connection, rows: Sequence[Row]) -> None:
        """Insert trajectories, or add what is known of them now."""
        _run(connection, self._trajectories, rows)

    def ends(self, connection: Connection, rows: Sequence[tuple[float, str, float]]) -> None:
        """Set when the last call of trajectories ended: rows of (seconds, id, seconds)."""
        _run(connection, self._ends, rows)

    def spans(self, connection: Connection, rows: Sequence[Row]) -> None:
        """Insert spans, or end them."""
        _run(connection, self._spans, rows)

    def scores(self, connection: Connection, rows: Sequence[Row]) -> None:
        """Insert scores, or replace them."""
        _run(connection, self._scores, rows)

    def corrections(self, connection: Connection, rows: Sequence[Row]) -> None:
        """Insert corrections, or replace them."""
        _run(connection, self._corrections, rows)

    def apps(self, connection: Connection, rows: Sequence[Row]) -> None:
        """Insert or replace what app processes say of themselves."""
        _run(connection, self._apps, rows)

    def _into(self, table: Table) -> Any:
        return sqlite.insert(table) if self._sqlite else postgresql.insert(table)

    def _insert(self, table: Table, columns: Sequence[str]) -> str:
        return self._text(self._into(table).on_conflict_do_nothing(), columns)

    def _replace(self, table: Table, columns: Sequence[str], *changed: str) -> str:
        statement = self._into(table)
        changes = {name: statement.excluded[name] for name in changed}
        return self._text(statement.on_conflict_do_update(index_elements=["id"], set_=changes), columns)

    def _upsert_trajectory(self) -> str:
        statement = self._into(tables.trajectories)
        old, new = tables.trajectories.c, statement.excluded
        keep = ("ended_at", "name", "scenario_key", "group_key", "session_id", "user_id", "error")
        changes: dict[str, Any] = {name: func.coalesce(new[name], old[name]) for name in keep}
        changes["last_call_at"] = case((_later(old, new.last_call_at), new.last_call_at), else_=old.last_call_at)
        # A single call that another one extended is single no longer; every other origin is final.
        changes["origin"] = case((old.origin == literal_column("'single'"), new.origin), else_=old.origin)
        return self._text(statement.on_conflict_do_update(index_elements=["id"], set_=changes), TRAJECTORY)

    def _text(self, statement: Any, columns: Sequence[str]) -> str:
        if hasattr(statement, "excluded"):
            compiled = statement.compile(dialect=self._dialect, column_keys=list(columns))
        else:
            compiled = statement.compile(dialect=self._dialect)
        assert tuple(compiled.positiontup) == tuple(columns), compiled.positiontup
        return str(compiled)


def _set_last_call() -> Any:
    table, at = tables.trajectories, bindparam("at")
    return update(table).where(table.c.id == bindparam("id"), _later(table.c, at)).values(last_call_at=at)


def _later(trajectory: Any, at: Any) -> Any:
    return or_(trajectory.last_call_at.is_(None), trajectory.last_call_at < at)


def _run(connection: Connection, statement: str, rows: Sequence[Row]) -> None:
    if rows:
        connection.exec_driver_sql(statement, list(rows))
