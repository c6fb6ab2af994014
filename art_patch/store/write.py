"""Writing what the recorder saw: one transaction a batch, messages kept once.

The writer remembers what it wrote, so as not to write it again. When the file was deleted or replaced, that is what
the new one lacks: messages are written again as calls need them, and trajectories that were announced in the old one.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, bindparam, case, delete, func, or_, update
from sqlalchemy.dialects.sqlite import insert

from art_patch.chain import ROOT, chain, verbatim
from art_patch.errors import StoreError
from art_patch.records import AppReport, Call, Record, Score, SpanInfo, TrajectoryInfo
from art_patch.store import tables
from art_patch.store.codec import pack_ids, pack_logprobs, squeeze
from art_patch.store.connect import Database

_SEEN_NODES = 50_000  # about 5 MiB; a miss only costs one INSERT OR IGNORE
_SEEN_TRAJECTORIES = 10_000
_TRIES = 3  # the write that meets a corrupt page, once more over a new connection, and into a new file

_APP_KEPT_S = 7 * 86_400.0
"""How long the last report of a process that is silent is kept."""

_MAX_INTEGER = (1 << 63) - 1

Row = dict[str, Any]


class Writer:
    """Turns records into rows. Not thread-safe: one writer thread a process."""

    def __init__(self, database: Database) -> None:
        """Write through `database`."""
        self._database = database
        self._generation = database.generation
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._announced: OrderedDict[str, TrajectoryInfo] = OrderedDict()
        self._lost: dict[str, TrajectoryInfo] = {}

    def write(self, records: Sequence[Record]) -> None:
        """Write the batch in one transaction; all of it or nothing.

        Scores are committed durably, calls with `synchronous=NORMAL`.

        Raises:
            StoreError: if the database refuses; nothing of the batch was written.
        """
        for tried in range(1, _TRIES + 1):
            try:
                return self._write(records)
            except StoreError:
                file_is_another = self._database.stale or self._generation != self._database.generation
                if tried == _TRIES or not file_is_another:
                    raise

    def _write(self, records: Sequence[Record]) -> None:
        self._database.renew()
        if self._generation != self._database.generation:
            self._generation = self._database.generation
            self._seen.clear()
            self._lost, self._announced = {**self._lost, **self._announced}, OrderedDict()
        batch = _Batch(self._seen)
        for record in records:
            batch.add(record)
        again = self._missing(records) if self._generation else ()
        for info in again:
            batch.add(info)
        with self._database.write(durable=bool(batch.scores)) as connection:
            if self._generation != self._database.generation:
                raise StoreError("the store was replaced just now; try again")
            batch.insert(connection)
        # Only a committed node may be skipped next time.
        self._seen.update(dict.fromkeys(batch.new_nodes))
        while len(self._seen) > _SEEN_NODES:
            self._seen.popitem(last=False)
        for record in (*records, *again):
            if isinstance(record, TrajectoryInfo):
                self._announced[record.id] = record
        while len(self._announced) > _SEEN_TRAJECTORIES:
            self._announced.popitem(last=False)

    def _missing(self, records: Sequence[Record]) -> Sequence[TrajectoryInfo]:
        """Trajectories that the calls belong to and that only the file before this one knows."""
        here = {record.id for record in records if isinstance(record, TrajectoryInfo)}
        found: dict[str, TrajectoryInfo] = {}
        for record in records:
            if not isinstance(record, Call):
                continue
            key = record.trajectory_id
            if not (key in here or key in found or key in self._announced):
                nothing_known = TrajectoryInfo(key, record.started_at)
                found[key] = self._lost.get(key, nothing_known)
        return tuple(found.values())


class _Batch:
    def __init__(self, seen: OrderedDict[bytes, None]) -> None:
        self._seen = seen
        self.new_nodes: dict[bytes, Row] = {}
        self.blobs: dict[bytes, Row] = {}
        self.trajectories: list[Row] = []
        self.spans: list[Row] = []
        self.calls: list[Row] = []
        self.choices: list[Row] = []
        self.scores: list[Row] = []
        self.apps: list[Row] = []
        self.last_call_at: dict[str, float] = {}

    def add(self, record: Record) -> None:
        match record:
            case Call():
                self._add_call(record)
            case TrajectoryInfo():
                row = {name: _plain(getattr(record, name)) for name in TrajectoryInfo.__slots__}
                self.trajectories.append(row | {"tags": list(record.tags), "metadata": dict(record.metadata)})
            case SpanInfo():
                self.spans.append({name: _plain(getattr(record, name)) for name in SpanInfo.__slots__})
            case Score():
                self.scores.append({name: _plain(getattr(record, name)) for name in Score.__slots__})
            case AppReport():
                self.apps.append({"id": record.id, "at": record.at, "facts": dict(record.facts)})

    def _nodes(self, messages: Sequence[Any], parent: bytes) -> bytes:
        for node, above, message in chain(messages, parent):
            if node not in self._seen and node not in self.new_nodes:
                self.new_nodes[node] = {"id": node, "parent": above, "body": squeeze(verbatim(message))}
            parent = node
        return parent

    def _blob(self, values: Sequence[Any]) -> bytes | None:
        if not values:
            return None
        body = verbatim(list(values))
        key = hashlib.blake2b(body, digest_size=16).digest()
        self.blobs[key] = {"id": key, "body": squeeze(body)}
        return key

    def _add_call(self, call: Call) -> None:
        prompt = self._nodes(call.messages, ROOT)
        for choice in call.choices:
            self.choices.append(
                {
                    "call_id": call.id,
                    "index": _plain(choice.index),
                    "answer": self._nodes([choice.message], prompt),
                    "finish_reason": _plain(choice.finish_reason),
                    "token_ids": pack_ids(choice.token_ids),
                    "logprobs": pack_logprobs(choice.logprobs),
                }
            )
        plain = ("id", "trajectory_id", "span_id", "started_at", "duration_ms", "ttft_ms", "requested_model", "policy",
                 "prompt_tokens", "completion_tokens", "status", "error", "fallback", "untrainable", "api",
                 "shadow_of")  # fmt: skip
        self.calls.append(
            {name: _plain(getattr(call, name)) for name in plain}
            | {
                "prompt": prompt,
                "tools": self._blob(call.tools),
                "params": dict(call.params),
                "prompt_token_ids": pack_ids(call.prompt_token_ids),
            }
        )
        ended_at = call.started_at + call.duration_ms / 1000
        key = _plain(call.trajectory_id)
        self.last_call_at[key] = max(ended_at, self.last_call_at.get(key, 0.0))

    def insert(self, connection: Connection) -> None:
        for table, rows in (
            (tables.nodes, list(self.new_nodes.values())),
            (tables.blobs, list(self.blobs.values())),
            (tables.calls, self.calls),
            (tables.choices, self.choices),
        ):
            if rows:  # a batch written twice (its first commit was not confirmed) leaves one copy
                connection.execute(insert(table).on_conflict_do_nothing(), rows)
        if self.trajectories:
            connection.execute(_UPSERT_TRAJECTORY, self.trajectories)
        if self.last_call_at:
            connection.execute(_TOUCH, [{"its_id": key, "its_end": at} for key, at in self.last_call_at.items()])
        if self.spans:
            connection.execute(_UPSERT_SPAN, self.spans)
        if self.scores:
            connection.execute(_UPSERT_SCORE, self.scores)
        if self.apps:
            connection.execute(_UPSERT_APP, self.apps)
            silent = max(row["at"] for row in self.apps) - _APP_KEPT_S
            connection.execute(delete(tables.apps).where(tables.apps.c.at < silent))


def _plain(value: Any) -> Any:
    """Return what a column of text or numbers can hold of `value`."""
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-8", "backslashreplace").decode()  # lone surrogates
    if isinstance(value, int):
        return max(-_MAX_INTEGER, min(value, _MAX_INTEGER))
    return value


def _upsert_trajectory() -> Any:
    statement = insert(tables.trajectories)
    old, new = tables.trajectories.c, statement.excluded
    keep = ("ended_at", "name", "scenario_key", "group_key", "session_id", "user_id", "error")
    changes: dict[str, Any] = {name: func.coalesce(new[name], old[name]) for name in keep}
    # A single call that another one extended is single no longer; every other origin is final.
    changes["origin"] = case((old.origin == "single", new.origin), else_=old.origin)
    return statement.on_conflict_do_update(index_elements=["id"], set_=changes)


def _upsert_all(table: Any, *names: str) -> Any:
    statement = insert(table)
    return statement.on_conflict_do_update(
        index_elements=["id"], set_={name: statement.excluded[name] for name in names}
    )


_UPSERT_TRAJECTORY = _upsert_trajectory()
_UPSERT_APP = _upsert_all(tables.apps, "at", "facts")
_UPSERT_SPAN = _upsert_all(tables.spans, "ended_at")
_UPSERT_SCORE = _upsert_all(tables.scores, "name", "value", "source", "at", "comment", "group_id", "rubric", "judge")
_TOUCH = (
    update(tables.trajectories)
    .where(
        tables.trajectories.c.id == bindparam("its_id"),
        or_(tables.trajectories.c.last_call_at.is_(None), tables.trajectories.c.last_call_at < bindparam("its_end")),
    )
    .values(last_call_at=bindparam("its_end"))
)
