"""Turns a batch of records into rows, and holds the SQL statements that insert these rows.

Messages and prompt ids are written only if they are new. A row is a tuple of plain values in the order of `COLUMNS`,
with JSON already as text. Rows go directly to the database's driver: SQLAlchemy only compiles each statement once for
the dialect, because its own `executemany` processes every value of every row, which takes as long as SQLite itself.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from operator import itemgetter
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Column, Connection, Table, bindparam, func, literal_column, or_, select
from sqlalchemy.dialects import postgresql, sqlite

from art_patch.store.schema import tables
from art_patch.store.schema.codec import blocks, pack_ids, pack_logprobs, rest, squeeze, squeeze_ids, uint32
from art_patch.trajectories import ROOT, chain, verbatim
from art_patch.types import AppReport, Call, Choice, Correction, Record, Score, SpanInfo, TrajectoryInfo

Row = tuple[Any, ...]

_OF_THE_JOB = ("group_id",)  # of a trajectory: set when groups are formed, never by the app

# What the app writes of each table: all columns but those that say whose row it is, which stand in the statements.
COLUMNS: Mapping[Table, tuple[str, ...]] = {
    table: tuple(
        name
        for name in table.c.keys()  # noqa: SIM118 - iterating over the collection gives columns
        if name not in tables.SCOPE and not (table is tables.trajectories and name in _OF_THE_JOB)
    )
    # In the order in which they are written: content before the rows that refer to it.
    for table in (
        tables.nodes,
        tables.token_blocks,
        tables.blobs,
        tables.calls,
        tables.choices,
        tables.trajectories,
        tables.spans,
        tables.scores,
        tables.corrections,
        tables.apps,
    )
}

# Turn values by column name into a row.
_IN_ORDER: Mapping[Table, Callable[[Mapping[str, Any]], Row]] = {
    table: itemgetter(*names) for table, names in COLUMNS.items()
}

_encode = json.JSONEncoder(separators=(",", ":"), default=repr, allow_nan=False).encode
_encode_anything = json.JSONEncoder(default=repr).encode

_MAX_INTEGER = (1 << 63) - 1

# Tables that repeat their trajectory's session and user.
_WITH_WHOSE = (tables.calls, tables.scores)

# Session and user of a trajectory.
Whose = tuple[str | None, str | None]


class Statements:
    """The INSERT and UPDATE statements for a connection's SQL dialect and project, compiled to text for the driver."""

    def __init__(self, connection: Connection) -> None:
        self._sqlite = connection.dialect.name == "sqlite"
        kind: Any = type(connection.dialect)
        self._dialect: Any = kind(paramstyle="qmark" if self._sqlite else "format")
        options = connection.get_execution_options()
        # Literals, not parameters: they are the same for all rows, and a parameter costs time for each of them.
        self._scope = {name: literal_column(str(int(options[name]))) for name in tables.SCOPE}
        replaced = {
            tables.spans: ("ended_at", "attributes", "error"),
            tables.scores: COLUMNS[tables.scores][2:],
            tables.corrections: COLUMNS[tables.corrections][2:],
            tables.apps: COLUMNS[tables.apps][1:],
        }
        # A batch is written again if its first commit was not confirmed. The second time must change nothing.
        self._insert = {table: self._text(self._into(table).on_conflict_do_nothing(), table) for table in COLUMNS}
        self._insert |= {table: self._replace(table, names) for table, names in replaced.items()}
        self._insert[tables.trajectories] = self._upsert_trajectory()
        self._ends = self._compiled(self._set_last_call(), ("at", "id", "at"))
        self._whose = {table: self._compiled(self._set_whose(table), ("key",) * 5) for table in _WITH_WHOSE}

    def insert(self, connection: Connection, table: Table, rows: Sequence[Row]) -> None:
        """Insert rows. If a key exists already, a score, correction or app report is replaced.

        A span gets its new end, attributes and error, a trajectory is updated, and every other row stays as it is.
        """
        _run(connection, self._insert[table], rows)

    def end(self, connection: Connection, rows: Sequence[tuple[float, str, float]]) -> None:
        """Set when the last call of trajectories ended, from rows of (end in seconds, trajectory id, the same end)."""
        _run(connection, self._ends, rows)

    def name(self, connection: Connection, trajectory_ids: Sequence[str]) -> None:
        """Copy the session and the user of these trajectories to their calls and scores, where they differ."""
        for statement in self._whose.values():
            _run(connection, statement, [(key,) * 5 for key in trajectory_ids])

    def _into(self, table: Table) -> Any:
        return sqlite.insert(table) if self._sqlite else postgresql.insert(table)

    def _replace(self, table: Table, changed: Iterable[str]) -> str:
        statement = self._into(table)
        changes = {name: statement.excluded[name] for name in changed}
        return self._text(statement.on_conflict_do_update(index_elements=list(table.primary_key), set_=changes), table)

    def _upsert_trajectory(self) -> str:
        table = tables.trajectories
        statement = self._into(table)
        old, new = table.c, statement.excluded
        keep = ("ended_at", "name", "scenario_key", "group_key", "session_id", "user_id", "error")
        changes: dict[str, Any] = {name: func.coalesce(new[name], old[name]) for name in keep}
        changes["last_call_at"] = sa.case((_later(old, new.last_call_at), new.last_call_at), else_=old.last_call_at)
        changes["learn"] = sa.and_(old.learn, new.learn)
        # A single call that another one extended is single no longer; every other origin is final.
        changes["origin"] = sa.case((old.origin == literal_column("'single'"), new.origin), else_=old.origin)
        return self._text(statement.on_conflict_do_update(index_elements=list(table.primary_key), set_=changes), table)

    def _set_last_call(self) -> Any:
        table, at = tables.trajectories, bindparam("at")
        return sa.update(table).where(self._is(table.c.id, "id"), _later(table.c, at)).values(last_call_at=at)

    def _set_whose(self, table: Table) -> Any:
        its = tables.trajectories.c
        query = {name: select(its[name]).where(self._is(its.id, "key")) for name in ("session_id", "user_id")}
        right = {name: found.scalar_subquery() for name, found in query.items()}
        wrong = or_(*(table.c[name].is_distinct_from(value) for name, value in right.items()))
        return sa.update(table).where(self._is(table.c.trajectory_id, "key"), wrong).values(right)

    def _is(self, column: Column[Any], parameter: str) -> Any:
        return sa.and_(column == bindparam(parameter), column.table.c.project_id == self._scope["project_id"])

    def _text(self, statement: Any, table: Table) -> str:
        scope = {name: value for name, value in self._scope.items() if name in table.c}
        return self._compiled(statement.values(scope).inline(), COLUMNS[table], column_keys=list(COLUMNS[table]))

    def _compiled(self, statement: Any, parameters: Sequence[str], **options: Any) -> str:
        compiled = statement.compile(dialect=self._dialect, **options)
        # A row is a plain tuple: if the order of the parameters changed, values would land in wrong columns.
        assert tuple(compiled.positiontup) == tuple(parameters), compiled.positiontup
        return str(compiled)


def _later(trajectory: Any, at: Any) -> Any:
    return or_(trajectory.last_call_at.is_(None), trajectory.last_call_at < at)


def _run(connection: Connection, statement: str, rows: Sequence[Row]) -> None:
    if rows:
        connection.exec_driver_sql(statement, list(rows))


class Batch:
    """A batch of records, converted to rows for each table of the store.

    `seen` tells whether the database has a message or a block of ids, `announced` what this process wrote of a
    trajectory.
    """

    def __init__(
        self,
        records: Sequence[Record],
        seen: Callable[[bytes], bool],
        announced: Callable[[str], TrajectoryInfo | None],
    ) -> None:
        self._seen = seen
        self._announced = announced
        self.new: dict[bytes, None] = {}
        self._rows: dict[Table, list[Row]] = {table: [] for table in COLUMNS}
        self._blobs: set[bytes] = set()
        self._infos = [record for record in records if isinstance(record, TrajectoryInfo)]
        self._last_call_at: dict[str, float] = {}
        self._to_name: set[str] = set()
        self._whose: dict[str, Whose] = {}
        # Before the calls: a trajectory's record may come after its calls in a batch.
        for info in self._infos:
            self._learn_whose(info)
        for record in records:
            if isinstance(record, Call):
                self._add_call(record)
            elif not isinstance(record, TrajectoryInfo):
                self._add(record)

    @property
    def durable(self) -> bool:
        """Whether the batch must survive a power cut, because it has scores or corrections, which come only once."""
        return bool(self._rows[tables.scores] or self._rows[tables.corrections])

    @property
    def latest_report(self) -> float | None:
        """When the newest report of an app process in this batch was made; `None` if it has none."""
        at = COLUMNS[tables.apps].index("at")
        return max((row[at] for row in self._rows[tables.apps]), default=None)

    def insert(self, connection: Connection, statements: Statements) -> None:
        """Insert all rows of the batch in the caller's transaction."""
        known = self._rows[tables.trajectories] = list(map(self._trajectory, self._infos))
        # Apps may write the same rows at once. On PostgreSQL two transactions that write them in different orders wait
        # for each other, so they come in the order of their keys. Nobody else writes these calls and choices.
        for table, rows in self._rows.items():
            in_order = table in (tables.calls, tables.choices)
            statements.insert(connection, table, rows if in_order else sorted(rows, key=itemgetter(0)))
        # Trajectories whose record came in an earlier batch only get a later end of the last call.
        others = sorted(self._last_call_at.keys() - {row[0] for row in known})
        statements.end(connection, [(self._last_call_at[key], key, self._last_call_at[key]) for key in others])
        statements.name(connection, sorted(self._to_name))

    def _row(self, table: Table, values: Mapping[str, Any]) -> None:
        self._rows[table].append(_IN_ORDER[table](values))

    def _add(self, record: SpanInfo | Score | Correction | AppReport) -> None:
        values = _values(record)
        if isinstance(record, Score):
            values["session_id"], values["user_id"] = self._whose_is(values["trajectory_id"])
        self._row(_TABLES[type(record)], values)

    def _trajectory(self, info: TrajectoryInfo) -> Row:
        values = _values(info)
        values["last_call_at"] = self._last_call_at.get(values["id"])
        return _IN_ORDER[tables.trajectories](values)

    def _add_call(self, call: Call) -> None:
        prompt = self._chain(call.messages, ROOT)
        for choice in call.choices:
            values = _values(choice)
            values |= {"call_id": call.id, "answer": self._chain((choice.message,), prompt)}
            values |= {"token_ids": pack_ids(choice.token_ids), "logprobs": pack_logprobs(choice.logprobs)}
            self._row(tables.choices, values)
        values = _values(call)
        trajectory_id = values["trajectory_id"]
        values["prompt_block"], values["prompt_token_ids"] = self._ids(call.prompt_token_ids)
        values["session_id"], values["user_id"] = self._whose_is(trajectory_id)
        self._row(tables.calls, values | {"prompt": prompt, "tools": self._blob(call.tools)})
        ended_at = call.started_at + call.duration_ms / 1000
        self._last_call_at[trajectory_id] = max(ended_at, self._last_call_at.get(trajectory_id, 0.0))

    def _learn_whose(self, info: TrajectoryInfo) -> None:
        key = storable(info.id)
        before = self._whose.get(key) or _whose(self._announced(info.id))
        if info.session_id is None and info.user_id is None:  # as most of them
            self._whose[key] = before
            return
        mine = _whose(info)
        # As `coalesce` does it in the table: an empty name is a name.
        session_id, user_id = (old if new is None else new for new, old in zip(mine, before, strict=True))
        self._whose[key] = now = (session_id, user_id)
        if now != before:  # calls that were written before this was known, by this process or another one
            self._to_name.add(key)

    def _whose_is(self, trajectory_id: str) -> Whose:
        if trajectory_id not in self._whose:
            known = self._announced(trajectory_id)
            self._whose[trajectory_id] = _whose(known)
            if known is None:  # another process announced it, or this one did and forgot; then the store knows it
                self._to_name.add(trajectory_id)
        return self._whose[trajectory_id]

    def _chain(self, messages: Sequence[Any], parent: bytes) -> bytes:
        for link in chain(messages, parent):
            parent = link.node
            if parent not in self.new and not self._seen(parent):
                self.new[parent] = None
                self._row(tables.nodes, {"id": parent, "parent": link.parent, "body": squeeze(link.body)})
        return parent

    def _ids(self, prompt_token_ids: Sequence[int] | None) -> tuple[bytes | None, bytes | None]:
        """Return the last whole block of a prompt's ids, and the ids after it."""
        if prompt_token_ids is None:
            return None, None
        ids, last = uint32(prompt_token_ids), None
        for block, parent, part in blocks(ids):
            last = block
            if block not in self.new and not self._seen(block):
                self.new[block] = None
                self._row(tables.token_blocks, {"id": block, "parent": parent, "ids": squeeze_ids(part)})
        return last, squeeze_ids(rest(ids))

    def _blob(self, values: Sequence[Any]) -> bytes | None:
        if not values:
            return None
        body = verbatim(list(values))
        key = blake2b(body, digest_size=16).digest()
        if key not in self._blobs:
            self._blobs.add(key)
            self._row(tables.blobs, {"id": key, "body": squeeze(body)})
        return key


def _whose(info: TrajectoryInfo | None) -> Whose:
    return (None, None) if info is None else (storable(info.session_id), storable(info.user_id))


def _json(value: Mapping[str, Any] | Sequence[Any]) -> str:
    if not value:
        return "{}" if isinstance(value, Mapping) else "[]"
    try:
        return _encode(value)
    except ValueError:  # NaN and the infinities are no JSON, and PostgreSQL refuses them
        return _encode(json.loads(_encode_anything(value), parse_constant=lambda _: None))


def storable(value: Any) -> Any:
    r"""Return what a text column can hold: lone surrogates and NUL become `\udXXX` and `\x00`."""
    if not isinstance(value, str) or (value.isascii() and "\0" not in value):
        return value
    return value.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def _whole(value: int) -> int:
    return max(-_MAX_INTEGER, min(value, _MAX_INTEGER))


_TABLES: Mapping[type, Table] = {
    TrajectoryInfo: tables.trajectories,
    SpanInfo: tables.spans,
    Call: tables.calls,
    Choice: tables.choices,
    Score: tables.scores,
    Correction: tables.corrections,
    AppReport: tables.apps,
}

# How a field is written, by the type of its column. Numbers and `None` are written as they are, and what is kept in
# bytes (`LargeBinary`) is no plain field.
_WRITTEN: Mapping[type, Callable[[Any], Any] | None] = {
    sa.Text: storable,
    sa.Integer: _whole,
    sa.JSON: _json,
    sa.Float: None,
    sa.Boolean: None,
}
_FIELDS = {
    record: [
        (column.name, _WRITTEN[type(column.type)])
        for column in tables.columns_of(table, record)
        if type(column.type) in _WRITTEN
    ]
    for record, table in _TABLES.items()
}


def _values(record: Record | Choice) -> dict[str, Any]:
    """Return the fields of a record as the columns of the same name hold them."""
    fields = _FIELDS[type(record)]
    return {
        name: getattr(record, name) if written is None else written(getattr(record, name)) for name, written in fields
    }
