"""Maintenance of a store's database: sizes, vacuum, backup, truncating the write-ahead log, and consistency checks.

Vacuum, backup and truncation are for SQLite stores (`backends/files.py`); a PostgreSQL server has tools of its own.
"""

import json
import shlex
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import zstandard
from sqlalchemy import Column, Connection, Select, and_, exists, func, or_, select, text
from sqlalchemy.exc import DBAPIError

from art_patch._lib.atomic_files import take_place
from art_patch.errors import ConfigError, StoreError
from art_patch.store.backends import files
from art_patch.store.backends.database import Database, Part
from art_patch.store.backends.files import bytes_of, file_of, under_the_lock
from art_patch.store.backends.scoping import sql_for
from art_patch.store.backends.urls import postgres_parameters
from art_patch.store.erasure.collect import collect_all
from art_patch.store.ledger.decisions import GENESIS, audit_hash
from art_patch.store.ledger.route import MODE_KEY, ROUTE_KEY
from art_patch.store.schema import EVERY_AGENT
from art_patch.store.schema.codec import block_id, expand, expand_ids, size_of
from art_patch.store.schema.tables import whole as tables  # its checks and sizes are of all projects
from art_patch.store.search_index import TABLE as WORDS
from art_patch.trajectories import node_id
from art_patch.types import CHALLENGERS, COPIES

_DBSTAT = "dbstat"  # not in every build of SQLite
_SAMPLE = 2_000
_RETRY_S = 0.1
_TRIES = 20
_ROWS = 500

# `parent` of the first message and of the first block of a chain.
_ROOT = b""

# A finding, a column, and the key that its values must be found in. NULL and `_ROOT` refer to nothing.
_REFERENCES: tuple[tuple[str, Column[Any], Column[Any]], ...] = (
    ("{} messages whose parent is missing", tables.nodes.c.parent, tables.nodes.c.id),
    ("{} blocks of prompt ids whose parent is missing", tables.token_blocks.c.parent, tables.token_blocks.c.id),
    ("{} calls whose prompt is missing", tables.calls.c.prompt, tables.nodes.c.id),
    ("{} calls whose prompt ids are missing", tables.calls.c.prompt_block, tables.token_blocks.c.id),
    ("{} calls whose tools are missing", tables.calls.c.tools, tables.blobs.c.id),
    ("{} calls whose trajectory is missing", tables.calls.c.trajectory_id, tables.trajectories.c.id),
    ("{} entries of the search index whose call is missing", tables.search_calls.c.call_id, tables.calls.c.id),
    ("{} answers whose message is missing", tables.choices.c.answer, tables.nodes.c.id),
    ("{} answers whose call is missing", tables.choices.c.call_id, tables.calls.c.id),
    ("{} trajectories whose group is missing", tables.trajectories.c.group_id, tables.groups.c.id),
    ("{} groups whose scenario is missing", tables.groups.c.scenario_key, tables.scenarios.c.key),
    ("{} trainings whose policy is missing", tables.trainings.c.policy, tables.policies.c.name),
    ("{} trained rows whose policy is missing", tables.trained_rows.c.policy, tables.policies.c.name),
    ("{} trained rows whose call is missing", tables.trained_rows.c.call_id, tables.calls.c.id),
    ("{} trained rows whose trajectory is missing", tables.trained_rows.c.trajectory_id, tables.trajectories.c.id),
    ("{} gate answers whose policy is missing", tables.gate_answers.c.policy, tables.policies.c.name),
    ("{} gate answers whose trajectory is missing", tables.gate_answers.c.trajectory_id, tables.trajectories.c.id),
    ("{} members of exports whose export is missing", tables.export_members.c.export_id, tables.exports.c.id),
)


@dataclass(frozen=True, slots=True)
class Table:
    """The size of a table: number of rows, and bytes with all indexes (`None` if the database does not report them)."""

    rows: int
    bytes: int | None


@dataclass(frozen=True, slots=True)
class Stats:
    """The contents and the sizes of a store."""

    bytes: int  # size of the database without its write-ahead log
    wal_bytes: int  # size of the write-ahead log; 0 on PostgreSQL, which has one log for all databases
    free_bytes: int  # unused bytes in the file, which `art-patch store vacuum` removes from it
    tables: Mapping[str, Table] = field(default_factory=dict[str, Table])
    projects: int = 1  # number of projects that share it
    trajectories: int = 0  # number of trajectories without copies
    # KiB of database and write-ahead log for each trajectory; `None` without trajectories.
    kib_per_trajectory: float | None = None
    # Text size of messages divided by their stored size, from a sample; `None` without messages.
    compression: float | None = None
    first_call_at: float | None = None  # start of the oldest call, seconds since the epoch
    last_call_at: float | None = None  # start of the newest call


@dataclass(frozen=True, slots=True)
class Vacuumed:
    """The numbers of orphans that a vacuum deleted, and the bytes of database and log before and after."""

    messages: int
    blocks: int
    tools: int
    bytes_before: int
    bytes_after: int


class Maintenance(Part):
    """Sizes, vacuum, backup and checks of a store's database, for the operator's commands `art-patch store ...`."""

    def stats(self) -> Stats:
        """Return the contents and the sizes of the store. SQLite reads the whole file for the bytes of each table."""
        with self._database.read() as connection:
            counts = {
                name: connection.scalar(select(func.count()).select_from(table)) or 0
                for name, table in sorted(tables.metadata.tables.items())
            }
            calls, trajectories = tables.calls.c.started_at, tables.trajectories
            first, last = connection.execute(select(func.min(calls), func.max(calls))).one()
            seen = select(func.count()).select_from(trajectories).where(trajectories.c.origin.not_in(COPIES))
            count = connection.scalar(seen) or 0
            compression = _compression(connection)
            if connection.dialect.name == "sqlite":
                total = _pragma(connection, "page_count") * _pragma(connection, "page_size")
                free = _pragma(connection, "freelist_count") * _pragma(connection, "page_size")
                sizes = _sqlite_sizes(connection)  # reads every page
            else:
                sizes = {name: _postgres_size(connection, name) for name in counts}
                total, free = sum(sizes.values()), 0
        wal = self.wal_bytes()
        return Stats(
            bytes=total,
            wal_bytes=wal,
            free_bytes=free,
            tables={name: Table(rows, sizes.get(name)) for name, rows in counts.items()},
            projects=counts["projects"],
            trajectories=count,
            kib_per_trajectory=(total + wal) / count / 1024 if count else None,
            compression=compression,
            first_call_at=first,
            last_call_at=last,
        )

    def projects(self, *, seen_since: float) -> list[dict[str, Any]]:
        """Return the facts of each project: its name, who serves it, and its calls and the apps seen since then."""
        calls, apps, policies, control = tables.calls.c, tables.apps.c, tables.policies.c, tables.control.c
        count = func.count()
        with self._database.read() as connection:

            def by_project(query: Any) -> dict[int, Any]:
                return {row[0]: row[1:] for row in connection.execute(query)}

            ids = connection.execute(select(tables.projects.c.id, tables.projects.c.name)).all()
            made = by_project(select(calls.project_id, count, func.max(calls.started_at)).group_by(calls.project_id))
            seen = by_project(select(apps.project_id, count).where(apps.at >= seen_since).group_by(apps.project_id))
            serves = by_project(select(policies.project_id, policies.name).where(policies.state == "champion"))
            routes = by_project(select(control.project_id, control.value).where(control.key == ROUTE_KEY))
            modes = by_project(select(control.project_id, control.value).where(control.key == MODE_KEY))
        return [
            {
                "project": name,
                "champion": serves.get(key, (None,))[0],
                "engine": json.loads(routes.get(key, ("{}",))[0]).get("base_url"),
                "mode": modes.get(key, (None,))[0],
                "apps": seen.get(key, (0,))[0],
                "calls": made.get(key, (0, None))[0],
                "last_call_at": made.get(key, (0, None))[1],
            }
            for key, name in sorted(ids)
        ]

    def sql_for_role(self, role: str) -> str:
        """Return the SQL that limits a PostgreSQL role to this project; a SQLite store raises `ConfigError`."""
        if file_of(self._database.url) is not None:
            raise ConfigError(
                "SQLite has no roles: who reads the file reads all its projects; use a store on PostgreSQL"
            )
        with self._database.read() as connection:
            schema = connection.scalar(text("SELECT current_schema()"))
        return sql_for(role, self._database.scope["project_id"], str(schema))

    def vacuum(self) -> Vacuumed:
        """Delete what nothing refers to and rewrite the SQLite file while writers wait; `StoreError` without room."""
        path = file_of(self._database.url)
        before = self._size(path)
        # First, so that the space of the orphans is given back too.
        gone = collect_all(self._database)
        if path is not None:
            files.check_room(path)
            with under_the_lock(path) as connection:
                connection.execute("VACUUM")
            scrub(self._database)  # VACUUM writes the whole file into the log
        return Vacuumed(gone["nodes"], gone["token_blocks"], gone["blobs"], before, self._size(path))

    def backup(self, target: Path) -> int:
        """Write a copy of a SQLite store to `target` while apps go on writing, and return its size in bytes.

        The copy holds no deleted data and is checked before it appears. `StoreError` if it fails or `target` exists.
        """
        path = file_of(self._database.url)
        if path is None:
            raise StoreError(f"a PostgreSQL store is backed up by its own tool: {_pg_dump(self._database.url, target)}")
        if target.exists():
            raise StoreError(f"{target} exists, and a backup overwrites nothing; name another file")
        part = Path(f"{target}.part")
        try:
            part.unlink(missing_ok=True)  # of a backup that was killed
            files.make_private(part)
            files.copy_to(path, part)
            take_place(part, target)
        except OSError as error:
            raise StoreError(f"cannot write {target}: {error.strerror}; name another file") from None
        finally:
            with suppress(OSError):
                part.unlink()
        return target.stat().st_size

    def verify(self) -> list[str]:
        """Check the whole store, and return one sentence for each inconsistency; an empty list means there is none.

        It runs the database's integrity check, looks for references to missing rows, recomputes the hashes of messages
        and prompt ids, and checks the chain of the audit log.
        """
        with self._database.read() as connection:
            problems = (_dangling(connection), _altered(connection), _ledger(connection))
            return [*self._database.check(connection), *chain.from_iterable(problems)]

    def wal_bytes(self) -> int:
        """Return the size of SQLite's write-ahead log in bytes; 0 on PostgreSQL."""
        path = file_of(self._database.url)
        return 0 if path is None else bytes_of(f"{path}-wal")

    def size(self) -> int:
        """Return the bytes of the database and its write-ahead log, without reading it."""
        return self._size(file_of(self._database.url))

    def _size(self, path: Path | None) -> int:
        if path is None:
            with self._database.read() as connection:
                return sum(_postgres_size(connection, name) for name in tables.metadata.tables)
        return bytes_of(path) + bytes_of(f"{path}-wal")


def scrub(database: Database) -> bool:
    """Truncate SQLite's log, which holds deleted data; return whether that succeeded in two seconds beside readers."""
    path = file_of(database.url)
    for _ in range(_TRIES if path is not None else 0):
        assert path is not None
        with under_the_lock(path) as connection:
            if files.truncate_log(connection):
                return True
        time.sleep(_RETRY_S)
    return path is None


def _pragma(connection: Connection, name: str) -> int:
    return int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())


def _sqlite_sizes(connection: Connection) -> dict[str, int]:
    """Return the bytes of each table with its indexes; empty if SQLite was built without `dbstat`."""
    query = f"SELECT m.tbl_name, SUM(s.pgsize) FROM {_DBSTAT} s JOIN sqlite_master m ON m.name = s.name"
    try:
        rows = connection.execute(text(f"{query} WHERE s.aggregate = 1 GROUP BY m.tbl_name"))
        found = {name: size for name, size in rows}
    except DBAPIError:
        return {}
    # FTS5 keeps the words of the search index in tables of its own.
    words = [name for name in found if name.startswith(f"{WORDS}_")]
    return found | {tables.search_calls.name: sum(found[name] for name in (*words, tables.search_calls.name))}


def _postgres_size(connection: Connection, table: str) -> int:
    return connection.scalar(text("SELECT pg_total_relation_size(to_regclass(:name))"), {"name": table}) or 0


def _pg_dump(url: str, target: Path) -> str:
    given: dict[str, Any] = postgres_parameters(url)
    names = {"host": "--host", "port": "--port", "user": "--username", "dbname": "--dbname"}
    options = [f"{option}={given[name]}" for name, option in names.items() if name in given]
    return shlex.join(["pg_dump", "--format=custom", f"--file={target}", *options])


def _compression(connection: Connection) -> float | None:
    """Return how many times smaller messages are stored than their text, from a sample."""
    # Ids are hashes, so the first rows by id are a random sample. A zstd frame holds the length of its text.
    nodes = tables.nodes.c
    kept = raw = 0
    heads = select(func.substr(nodes.body, 1, 14), func.length(nodes.body)).order_by(nodes.id).limit(_SAMPLE)
    for head, size in connection.execute(heads):
        with suppress(zstandard.ZstdError):  # a damaged row is for `verify` to find
            whole = size_of(head)
            if whole is not None:
                kept, raw = kept + size, raw + whole
    return raw / kept if kept else None


def _dangling(connection: Connection) -> Iterator[str]:
    its = tables.trajectories.c
    for table in (tables.calls, tables.scores):
        differs = or_(*(table.c[name].is_distinct_from(its[name]) for name in ("session_id", "user_id")))
        joined = table.join(
            tables.trajectories, and_(its.id == table.c.trajectory_id, its.project_id == table.c.project_id)
        )
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
        here = and_(there.c[key.name] == column, there.c.project_id == column.table.c.project_id)
        query = select(func.count()).where(column.is_not(None), ~exists().where(here))
        if column.type.python_type is bytes:  # only chains of content have a root
            query = query.where(column != _ROOT)
        if count := connection.scalar(query):
            yield sentence.format(count)


def _altered(connection: Connection) -> Iterator[str]:
    for node in _portions(connection, select(tables.nodes)):
        # The id was hashed from the parsed message, not from its text, so the text is parsed here.
        if node_id(node.parent, json.loads(expand(node.body))) != node.id:
            yield f"message {node.id.hex()} does not match its hash"
    for block in _portions(connection, select(tables.token_blocks)):
        if block_id(block.parent, expand_ids(block.ids)) != block.id:
            yield f"block {block.id.hex()} of prompt ids does not match its hash"


def _ledger(connection: Connection) -> Iterator[str]:
    policies = tables.policies.c
    for what, states in (("champions", ("champion",)), ("challengers", CHALLENGERS)):
        query = select(policies.project_id, policies.name).where(policies.state.in_(states)).order_by(policies.name)
        names: dict[int, list[str]] = defaultdict(list)
        for project_id, name in connection.execute(query):
            names[project_id].append(name)
        for its in names.values():  # none is right: a project whose engine never ran has no champion
            if len(its) > 1:
                yield f"{len(its)} {what}: {', '.join(its)}"
    ends: dict[int, str] = {}
    for entry in _portions(connection, select(tables.audit).order_by(tables.audit.c.id)):
        previous = ends.get(entry.project_id, GENESIS)
        if entry.previous != previous or entry.hash != audit_hash(
            previous, entry.at, entry.who, entry.action, entry.detail
        ):
            yield f"audit entry {entry.id} was altered or an entry before it is gone"
            return  # every later entry would be reported too
        ends[entry.project_id] = entry.hash


def _portions(connection: Connection, query: Select[Any]) -> Iterator[Any]:
    # Portions bound the memory: the messages of a year are many gigabytes.
    with connection.execute(query, execution_options={"yield_per": _ROWS}) as rows:
        yield from rows
