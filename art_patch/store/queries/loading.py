"""Turns rows back into records, most of all into `Call`s, and finds the words with which runs open, for lists of runs.

A call's row refers to the last message of its prompt and to the last block of its prompt ids. The others are found by
following the parent of each row. A message or block that several calls share is read once.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

from sqlalchemy import CTE, Column, Connection, SelectBase, Table, bindparam, func, select

from art_patch.store.schema import tables
from art_patch.store.schema.codec import expand, expand_ids, ids_of, parse, unpack_ids, unpack_logprobs
from art_patch.trajectories import ROOT
from art_patch.types import JSON, Call, Choice, Correction, Score, SpanInfo

_T = TypeVar("_T")
_Record = TypeVar("_Record", Score, SpanInfo, Correction)
Row = tuple[Any, ...]

_IN = 500  # SQLite allows 32,766 parameters, but a long statement keeps a reader open for long

_CHOICE = ("call_id", "index", "answer", "finish_reason", "token_ids", "logprobs")


def chain_of(table: Table, leaves: SelectBase) -> CTE:
    """Return `(id, parent)` of the rows `leaves` and all their ancestors, as a part of a query."""
    above = select(table.c.id, table.c.parent).where(table.c.id.in_(leaves)).cte(recursive=True)
    up = table.alias()
    # Not a join: the databases cannot know that few rows climb, and would read the whole table to join them at once.
    parent = select(up.c.parent).where(up.c.id == above.c.parent).scalar_subquery()
    return above.union(select(above.c.parent, parent).where(above.c.parent != ROOT))


def _with_ancestors(table: Table, body: Column[Any], leaves: SelectBase) -> SelectBase:
    """Return the query for `(id, parent, body)` of the rows `leaves` and all their ancestors."""
    return select(table.c.id, table.c.parent, body).where(table.c.id.in_(select(chain_of(table, leaves).c.id)))


# Built once, because SQLAlchemy takes longer to build a statement than SQLite to run it. Choices, messages and tools
# are selected by trajectory: sending hundreds of call ids back takes longer than finding the calls again.
_calls, _choices, _nodes, _blocks, _blobs = (
    tables.calls, tables.choices, tables.nodes, tables.token_blocks, tables.blobs
)  # fmt: skip
# Columns that hold a field of a call as it is; what is shared between calls is put together again below.
_AS_THEY_ARE = tuple(
    column.name for column in tables.columns_of(_calls, Call) if column.name not in ("tools", "prompt_token_ids")
)
_OURS = _calls.c.trajectory_id.in_(bindparam("trajectories", expanding=True))
_ITS_CALL = _calls.c.id == _choices.c.call_id
_CALLS = (
    select(*(_calls.c[name] for name in (*_AS_THEY_ARE, "prompt", "tools", "prompt_block", "prompt_token_ids")))
    .where(_OURS)
    .order_by(_calls.c.started_at, _calls.c.id)
)
_CHOICES = select(*(_choices.c[name] for name in _CHOICE)).join(_calls, _ITS_CALL).where(_OURS).order_by("index")
_MESSAGES = _with_ancestors(
    _nodes,
    _nodes.c.body,
    select(_calls.c.prompt).where(_OURS).union(select(_choices.c.answer).join(_calls, _ITS_CALL).where(_OURS)),
)
_BLOCKS = _with_ancestors(
    _blocks, _blocks.c.ids, select(_calls.c.prompt_block).where(_OURS, _calls.c.prompt_block.is_not(None))
)
_TOOLS = select(_blobs.c.id, _blobs.c.body).where(_blobs.c.id.in_(select(_calls.c.tools).where(_OURS)))


def some_of(values: Sequence[_T], most: int = _IN) -> Iterator[Sequence[_T]]:
    """Yield `values` in parts: by default, parts that are short enough for the `IN` list of one SQL statement."""
    for start in range(0, len(values), most):
        yield values[start : start + most]


def rows_in(connection: Connection, query: Any, column: Any, values: Sequence[Any]) -> Iterator[Any]:
    """Yield the rows of `query` whose `column` has one of the values; the query's order holds for equal values only."""
    for some in some_of(values):
        yield from connection.execute(query.where(column.in_(some)))


def records_of(
    connection: Connection, table: Table, record: type[_Record], order: str, ids: Sequence[str], *conditions: Any
) -> defaultdict[str, list[_Record]]:
    """Return the records that belong to each of these trajectories, sorted by the column `order`."""
    query = select(*tables.columns_of(table, record)).where(*conditions).order_by(table.c[order], table.c.id)
    found: dict[str, list[_Record]] = defaultdict(list)
    for row in rows_in(connection, query, table.c.trajectory_id, ids):
        one = record(*row)
        found[one.trajectory_id].append(one)
    return found


def load_calls(connection: Connection, trajectory_ids: Sequence[str]) -> dict[str, list[Call]]:
    """Return the calls of each of these trajectories in the order in which they started."""
    found: dict[str, list[Call]] = defaultdict(list)
    for some in some_of(trajectory_ids):
        for call in _load_some(connection, some):
            found[call.trajectory_id].append(call)
    return found


def _load_some(connection: Connection, trajectory_ids: Sequence[str]) -> Iterator[Call]:
    def ask(query: Any) -> Sequence[Row]:
        return cast("Sequence[Row]", connection.execute(query, {"trajectories": trajectory_ids}).all())

    rows = ask(_CALLS)
    answers: dict[str, list[Row]] = defaultdict(list)
    for row in ask(_CHOICES):
        answers[row[0]].append(row)
    messages, blocks = _Messages(ask(_MESSAGES)), _Blocks(ask(_BLOCKS))
    tools = {key: tuple(parse(expand(body))) for key, body in ask(_TOOLS)}
    for row in rows:
        *values, prompt, its_tools, block, rest = row
        # Positional, because this runs once per answer of every call that the job reads.
        choices = tuple(
            Choice(index, messages.one(answer), finish_reason, unpack_ids(token_ids), unpack_logprobs(logprobs))
            for _, index, answer, finish_reason, token_ids, logprobs in answers[row[0]]
        )
        yield Call(
            **dict(zip(_AS_THEY_ARE, values, strict=True)),
            messages=messages.chain(prompt),
            choices=choices,
            tools=tools.get(its_tools, ()),
            prompt_token_ids=blocks.ids(block, rest),
        )


class _Messages:
    """Messages by node, with their chains up to the first message."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._found: dict[bytes, tuple[bytes, JSON]] = {
            node: (parent, parse(expand(body))) for node, parent, body in rows
        }
        self._chains: dict[bytes, tuple[JSON, ...]] = {ROOT: ()}

    def one(self, node: bytes) -> JSON:
        return self._found[node][1]

    def chain(self, node: bytes) -> tuple[JSON, ...]:
        path: list[bytes] = []
        while node not in self._chains:
            path.append(node)
            node = self._found[node][0]
        messages = (*self._chains[node], *(self._found[step][1] for step in reversed(path)))
        if path:  # the next call of the same run extends it, and only its new messages are walked
            self._chains[path[0]] = messages
        return messages


class _Blocks:
    """Prompt ids by block, with the blocks before it."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._found: dict[bytes, tuple[bytes, bytes]] = {
            block: (parent, expand_ids(ids)) for block, parent, ids in rows
        }

    def ids(self, block: bytes | None, rest: bytes | None) -> tuple[int, ...] | None:
        if rest is None:  # no ids are known; an empty rest means that the blocks are all of them
            return None
        parts = [expand_ids(rest)]
        while block:
            block, part = self._found[block]
            parts.append(part)
        return ids_of(b"".join(reversed(parts)))


_OPENING = 4  # messages at the start of a prompt, among which the user's first one is looked for

_PROMPTS = select(_nodes.c.id).where(_nodes.c.id.in_(bindparam("prompts", expanding=True)))
_CHAINS = select(chain_of(_nodes, _PROMPTS))


def openings_of(connection: Connection, ids: Sequence[str]) -> dict[str, str]:
    """Return the first words of the user in the first prompt of each of these trajectories."""
    its, calls = _calls.alias().c, _calls.c
    start = select(func.min(its.started_at)).where(its.trajectory_id == calls.trajectory_id).scalar_subquery()
    first = select(calls.trajectory_id, calls.prompt).where(calls.started_at == start).order_by(calls.id.desc())
    prompts = {key: prompt for key, prompt in rows_in(connection, first, calls.trajectory_id, ids)}
    # A prompt is named by its last message, so all parents up to the first message are read before any body.
    above: dict[bytes, bytes] = {}
    for some in some_of(sorted(set(prompts.values()) - {ROOT})):
        above |= {node: parent for node, parent in connection.execute(_CHAINS, {"prompts": some})}
    paths: dict[str, list[bytes]] = {}
    for key, node in prompts.items():
        path: list[bytes] = []
        while node in above:
            path.append(node)
            node = above[node]
        paths[key] = path[::-1][:_OPENING]
    wanted = {node for path in paths.values() for node in path}
    rows = rows_in(connection, select(_nodes.c.id, _nodes.c.body), _nodes.c.id, sorted(wanted))
    bodies = {node: json.loads(expand(body)) for node, body in rows}
    return {key: _first_words([bodies[node] for node in path if node in bodies]) for key, path in paths.items()}


def _first_words(messages: Sequence[Any]) -> str:
    for message in messages:
        if message.get("role") == "user":
            content: Any = message.get("content")
            if isinstance(content, list):  # parts: texts and pictures
                parts: list[Any] = content
                content = " ".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
            return " ".join(str(content or "").split())[:200]
    return ""
