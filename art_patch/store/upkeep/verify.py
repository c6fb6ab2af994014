"""Proving the store sound: what is referred to exists, what is chained matches.

Written in SQLAlchemy's expressions, so that both databases are asked the same. Rows come in portions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from sqlalchemy import Column, Connection, Select, and_, exists, func, or_, select

from art_patch.store.backends.database import Database
from art_patch.store.ledger.audit import GENESIS, audit_hash
from art_patch.store.schema import EVERY_AGENT, tables
from art_patch.store.schema.codec import expand, expand_ids
from art_patch.store.schema.tokens import block_id
from art_patch.trajectories import node_id
from art_patch.types import CHALLENGERS

_ROWS = 500

_ROOT = b""
"""What the first message and the first block hang below."""

_REFERENCES: tuple[tuple[str, Column[Any], Column[Any]], ...] = (
    ("{} messages whose parent is missing", tables.nodes.c.parent, tables.nodes.c.id),
    ("{} blocks of prompt ids whose parent is missing", tables.token_blocks.c.parent, tables.token_blocks.c.id),
    ("{} calls whose prompt is missing", tables.calls.c.prompt, tables.nodes.c.id),
    ("{} calls whose prompt ids are missing", tables.calls.c.prompt_block, tables.token_blocks.c.id),
    ("{} calls whose tools are missing", tables.calls.c.tools, tables.blobs.c.id),
    ("{} calls whose trajectory is missing", tables.calls.c.trajectory_id, tables.trajectories.c.id),
    ("{} answers whose message is missing", tables.choices.c.answer, tables.nodes.c.id),
    ("{} answers whose call is missing", tables.choices.c.call_id, tables.calls.c.id),
    ("{} trajectories whose group is missing", tables.trajectories.c.group_id, tables.groups.c.id),
    ("{} groups whose scenario is missing", tables.groups.c.scenario_key, tables.scenarios.c.key),
    ("{} trainings whose policy is missing", tables.trainings.c.policy, tables.policies.c.name),
    ("{} trained rows whose policy is missing", tables.trained_rows.c.policy, tables.policies.c.name),
    ("{} trained rows whose call is missing", tables.trained_rows.c.call_id, tables.calls.c.id),
    ("{} trained rows whose trajectory is missing", tables.trained_rows.c.trajectory_id, tables.trajectories.c.id),
    ("{} members of exports whose export is missing", tables.export_members.c.export_id, tables.exports.c.id),
)
"""What is said if values of one column are not in another. NULL, and `_ROOT` in bytes, refer to nothing."""


def verify(database: Database) -> list[str]:
    """Return every inconsistency found, in words; empty means sound."""
    with database.read() as connection:
        return [*database.check(connection), *_dangling(connection), *_altered(connection), *_ledger(connection)]


def _dangling(connection: Connection) -> Iterator[str]:
    its = tables.trajectories.c
    for table in (tables.calls, tables.scores):
        differs = or_(*(table.c[name].is_distinct_from(its[name]) for name in ("session_id", "user_id")))
        joined = table.join(tables.trajectories, its.id == table.c.trajectory_id)
        if count := connection.scalar(select(func.count()).select_from(joined).where(differs)):
            yield f"{count} {table.name} whose session or user is not their trajectory's"
    for table in tables.metadata.sorted_tables:
        if "project_id" in table.c and table is not tables.agents:
            known = exists().where(tables.projects.c.id == table.c.project_id)
            if "agent_id" in table.c:
                mine = exists().where(
                    tables.agents.c.id == table.c.agent_id, tables.agents.c.project_id == table.c.project_id
                )
                known = and_(known, or_(mine, table.c.agent_id == EVERY_AGENT))
            if count := connection.scalar(select(func.count()).select_from(table).where(~known)):
                yield f"{count} rows of {table.name} whose project or agent is missing"
    for sentence, column, key in _REFERENCES:
        there = key.table.alias()
        query = select(func.count()).where(column.is_not(None), ~exists().where(there.c[key.name] == column))
        if column.type.python_type is bytes:
            query = query.where(column != _ROOT)
        if count := connection.scalar(query):
            yield sentence.format(count)


def _altered(connection: Connection) -> Iterator[str]:
    for node in _portions(connection, select(tables.nodes)):
        if node_id(node.parent, json.loads(expand(node.body))) != node.id:
            yield f"message {node.id.hex()} does not match its hash"
    for block in _portions(connection, select(tables.token_blocks)):
        if block_id(block.parent, expand_ids(block.ids)) != block.id:
            yield f"block {block.id.hex()} of prompt ids does not match its hash"


def _ledger(connection: Connection) -> Iterator[str]:
    query = select(tables.policies.c.name).where(tables.policies.c.state == "champion")
    champions = connection.scalars(query.order_by(tables.policies.c.name)).all()
    if len(champions) > 1:
        yield f"{len(champions)} champions: {', '.join(champions)}"
    query = select(tables.policies.c.name).where(tables.policies.c.state.in_(CHALLENGERS))
    challengers = connection.scalars(query.order_by(tables.policies.c.name)).all()
    if len(challengers) > 1:
        yield f"{len(challengers)} challengers: {', '.join(challengers)}"
    ends: dict[int, str] = {}
    for entry in _portions(connection, select(tables.audit).order_by(tables.audit.c.id)):
        previous = ends.get(entry.project_id, GENESIS)
        if entry.previous != previous or entry.hash != audit_hash(
            previous, entry.at, entry.who, entry.action, entry.detail
        ):
            yield f"audit entry {entry.id} was altered or an entry before it is gone"
            return
        ends[entry.project_id] = entry.hash


def _portions(connection: Connection, query: Select[Any]) -> Iterator[Any]:
    with connection.execute(query, execution_options={"yield_per": _ROWS}) as rows:
        yield from rows
