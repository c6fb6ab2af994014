"""Records which data left the store (exports, tracker uploads) and which data came in (imports).

The record of an export is written before the file's first row, and completed after the last one. A process that is
killed in between leaves a record without a file, but never a file without a record. When a user is erased, these
records tell which files hold the user's data; the files themselves are only listed, not deleted.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import delete, insert, select, update

from art_patch._lib.ids import new_id
from art_patch.store.backends.database import Database
from art_patch.store.ledger.decisions import note
from art_patch.store.queries.loading import some_of
from art_patch.store.schema import tables
from art_patch.types import JSON, SpanInfo


@dataclass(frozen=True, slots=True)
class Export:
    """The record of an export: a file, or an upload to a tracker, with data of the store.

    Attributes:
        at: when the export began, seconds since the epoch.
        who: name of the person or job that exported.
        path: absolute path, or `-` for stdout.
        trajectories: number of trajectories with data in the file.
    """

    id: str
    at: float
    who: str
    path: str
    format: str
    trajectories: int


class ExportNote:
    """The record of an export in progress: `Transfers.note_export` makes it, and the exporter adds trajectories."""

    def __init__(self, database: Database, export_id: str) -> None:
        """Begin with no trajectories."""
        self._database = database
        self.id = export_id
        self.trajectories = 0

    def add(self, trajectory_ids: Iterable[str]) -> None:
        """Record that the export will hold data of these trajectories. Call it before the data is written.

        A trajectory that was added before is ignored.
        """
        rows = [{"trajectory_id": key, "export_id": self.id} for key in sorted(set(trajectory_ids))]
        if not rows:
            return
        table = tables.export_members
        keys = [row["trajectory_id"] for row in rows]
        with self._database.write(durable=True) as connection:
            query = select(table.c.trajectory_id).where(table.c.export_id == self.id, table.c.trajectory_id.in_(keys))
            known = set(connection.scalars(query))  # a run whose data comes in several rows of the file
            new = [row for row in rows if row["trajectory_id"] not in known]
            if new:
                connection.execute(insert(table), new)
        self.trajectories += len(new)


class Transfers:
    """Records exports and imports, and reads and writes the rows that these need besides trajectories."""

    def __init__(self, database: Database) -> None:
        """Read and write through `database`."""
        self._database = database

    @contextmanager
    def note_export(
        self,
        path: str,
        format: str,
        *,
        who: str,
        now: float | None = None,
        filters: JSON | None = None,
        at_once: bool = False,
    ) -> Generator[ExportNote]:
        """Record an export while the block writes it. If the block fails, no file is left, and the record is removed.

        Args:
            path: path of the file; `-` for stdout.
            format: format of the file, such as `chat` or `trajectories`.
            filters: the filters that select the trajectories. The audit log gets only their names, because their values
                may be users' texts.
            at_once: each row leaves the machine when it is written, as with a tracker. Then, as for stdout, the record
                stays even if the block fails.
        """
        at = time.time() if now is None else now
        export = ExportNote(self._database, new_id(at))
        row = {"id": export.id, "at": at, "who": who, "path": path, "format": format, "trajectories": 0}
        with self._database.write(durable=True) as connection:
            connection.execute(insert(tables.exports).values(row))
        try:
            yield export
        except BaseException:
            # Data that went to a tracker or to stdout cannot be taken back, so its note must stay.
            if (at_once or path == "-") and export.trajectories:
                self._finish(export, row, filters)
            else:  # a file is written under a temporary name, so after a failure there is none
                self._forget(export)
            raise
        self._finish(export, row, filters)

    def exports(self, *, limit: int = 100) -> tuple[Export, ...]:
        """Return the records of the newest `limit` exports, newest first."""
        table = tables.exports
        with self._database.read() as connection:
            rows = connection.execute(
                select(*tables.columns_of(table, Export)).order_by(table.c.at.desc(), table.c.id.desc()).limit(limit)
            )
            return tuple(Export(**row) for row in rows.mappings())

    def spans(self, trajectory_ids: Sequence[str]) -> dict[str, tuple[SpanInfo, ...]]:
        """Return the spans of these trajectories, in the order they started."""
        table = tables.spans
        found: dict[str, tuple[SpanInfo, ...]] = {}
        with self._database.read() as connection:
            for some in some_of(trajectory_ids):
                query = select(*tables.columns_of(table, SpanInfo)).where(table.c.trajectory_id.in_(some))
                query = query.order_by(table.c.started_at, table.c.id)
                for row in connection.execute(query).mappings():
                    span = SpanInfo(**row)
                    found[span.trajectory_id] = (*found.get(span.trajectory_id, ()), span)
        return found

    def groups_of(self, trajectory_ids: Sequence[str]) -> dict[str, JSON]:
        """Return the group of each trajectory, as the JSON object that an exported trajectory contains."""
        groups, table = tables.groups.c, tables.trajectories
        found: dict[str, JSON] = {}
        columns = (groups.id, groups.scenario_key, groups.how, groups.held_out, groups.state, groups.created_at)
        with self._database.read() as connection:
            for some in some_of(trajectory_ids):
                query = (
                    select(table.c.id.label("trajectory_id"), *columns, groups.reason)
                    .join(tables.groups, groups.id == table.c.group_id)
                    .where(table.c.id.in_(some))
                )
                for row in connection.execute(query).mappings():
                    facts = {str(name): value for name, value in row.items() if name != "trajectory_id"}
                    facts["held_out"] = bool(facts["held_out"])  # SQLite gives 0 or 1, and JSON must not
                    found[row["trajectory_id"]] = {name: value for name, value in facts.items() if value is not None}
        return found

    def bases(self) -> dict[str, str]:
        """Return the fingerprint of the base model of each policy, by the policy's name."""
        table = tables.policies
        with self._database.read() as connection:
            rows = connection.execute(select(table.c.name, table.c.base_sha256))
            return {row.name: row.base_sha256 for row in rows}

    def known(self, trajectory_ids: Sequence[str]) -> set[str]:
        """Return those of these trajectory ids that are in the store already, so that an import can skip them."""
        column = tables.trajectories.c.id
        with self._database.read() as connection:
            return {
                key
                for some in some_of(trajectory_ids)
                for key in connection.scalars(select(column).where(column.in_(some)))
            }

    def add_groups(self, groups: Mapping[str, JSON], *, now: float | None = None) -> None:
        """Put imported trajectories into the groups that they were exported with.

        A group that the store has already stays as it is, and so does a trajectory that is in a group already.

        Args:
            groups: the group of each trajectory id, as `groups_of` returns it.
            now: when new scenarios were first seen, seconds since the epoch.
        """
        at = time.time() if now is None else now
        by_id = {group["id"]: group for group in groups.values()}  # each member brings its group
        if not by_id:
            return
        names = ("id", "scenario_key", "how", "held_out", "state", "created_at", "reason")
        rows = [{name: group.get(name) for name in names} for _, group in sorted(by_id.items())]
        scenarios = {group["scenario_key"]: group["held_out"] for group in by_id.values()}
        table = tables.trajectories
        with self._database.write(durable=True) as connection:
            connection.execute(
                # A scenario that is here keeps its side: what was trained on must not test a policy later.
                self._database.insert(tables.scenarios).on_conflict_do_nothing(),
                [{"key": key, "held_out": held, "first_seen_at": at} for key, held in sorted(scenarios.items())],
            )
            connection.execute(self._database.insert(tables.groups).on_conflict_do_nothing(), rows)
            for trajectory_id, group in sorted(groups.items()):
                # A run that is in a group here stays in it: its siblings and scores are here.
                alone = table.c.id == trajectory_id, table.c.group_id.is_(None)
                connection.execute(update(table).where(*alone).values(group_id=group["id"]))

    def note_import(self, path: str, *, who: str, metrics: JSON, now: float | None = None) -> None:
        """Add an audit entry that says which file was imported, by whom, and how many rows it added (`metrics`)."""
        with self._database.write(durable=True) as connection:
            note(connection, who, "import", {"path": path, **metrics}, time.time() if now is None else now)

    def note_copy(
        self, action: Literal["export policy", "push policy", "pushed policy"], *, who: str, detail: JSON,
        now: float | None = None,
    ) -> None:  # fmt: skip
        """Add an audit entry about a copy of a policy that leaves the project.

        Callers add it before they make the copy, so that every copy is recorded.

        Args:
            action: `export policy` for a copy on disk, `push policy` for an upload to a hub that is about to begin,
                `pushed policy` for an upload that has ended.
            detail: the policy, the format and the destination.
        """
        with self._database.write(durable=True) as connection:
            note(connection, who, action, detail, time.time() if now is None else now)

    def _finish(self, export: ExportNote, row: JSON, filters: JSON | None) -> None:
        table = tables.exports
        detail = {"export": export.id, "path": row["path"], "format": row["format"]}
        detail |= {"trajectories": export.trajectories, "filters": sorted(filters or ())}
        with self._database.write(durable=True) as connection:
            changed = update(table).where(table.c.id == export.id).values(trajectories=export.trajectories)
            connection.execute(changed)
            note(connection, row["who"], "export", detail, row["at"])

    def _forget(self, export: ExportNote) -> None:
        members = tables.export_members
        with self._database.write(durable=True) as connection:
            connection.execute(delete(members).where(members.c.export_id == export.id))
            connection.execute(delete(tables.exports).where(tables.exports.c.id == export.id))


@dataclass(frozen=True, slots=True)
class SentItem:
    """The record that a tracker has an item: a span, a score or a policy's metrics.

    Attributes:
        item: key of the item, unique at the tracker.
        digest: hash of the data that was sent. If the hash of the present data differs, the item must be sent again.
        trajectory_id: id of the run that the item belongs to; `None` for a policy's metrics.
    """

    item: str
    digest: str
    trajectory_id: str | None = None


class Sent:
    """Records which items each tracker has, so that a repeated upload sends only new and changed items."""

    # A note is written after the tracker took the item. A process that is killed in between sends the item once more,
    # but never forgets one.

    def __init__(self, database: Database) -> None:
        """Read and write through `database`."""
        self._database = database

    def digests(self, target: str, items: Sequence[str]) -> dict[str, str]:
        """Return the digest of those items that the tracker `target` has, as it was when they were sent."""
        table = tables.sent.c
        with self._database.read() as connection:
            return {
                item: digest
                for some in some_of(items)
                for item, digest in connection.execute(
                    select(table.item, table.digest).where(table.target == target, table.item.in_(some))
                )
            }

    def add(self, target: str, items: Sequence[SentItem], *, now: float) -> None:
        """Record that the tracker `target` has these items now; a record of an older version is replaced."""
        if not items:
            return
        rows = [
            {"target": target, "item": one.item, "trajectory_id": one.trajectory_id, "digest": one.digest, "at": now}
            for one in items
        ]
        new = self._database.insert(tables.sent)
        # The trajectory of an item never changes, so it is not replaced.
        changes = {"digest": new.excluded.digest, "at": new.excluded.at}
        with self._database.write(durable=True) as connection:
            connection.execute(
                new.on_conflict_do_update(index_elements=list(tables.sent.primary_key), set_=changes), rows
            )
