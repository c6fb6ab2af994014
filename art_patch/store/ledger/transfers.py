"""Records which data left the store (exports, tracker uploads) and which data came in (imports).

The record of an export is written before the file's first row, and completed after the last one. A process that is
killed in between leaves a record without a file, but never a file without a record. When a user is erased, these
records tell which files hold the user's data; the files themselves are only listed, not deleted.
"""

import time
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Literal

from sqlalchemy import delete, insert, select, update

from art_patch._lib.ids import new_id
from art_patch.errors import ConfigError
from art_patch.store.backends.database import Database, Part, decide_alone
from art_patch.store.ledger.decisions import add_scenarios, insert_policy, note, policy_of
from art_patch.store.queries.loading import rows_in
from art_patch.store.rows import storable
from art_patch.store.schema import tables
from art_patch.types import JSON, Policy

# What an exported trajectory contains of its group.
_OF_GROUP = ("id", "scenario_key", "how", "held_out", "state", "created_at", "reason")


@dataclass(frozen=True, slots=True)
class Export:
    """The record of an export: a file, or an upload to a tracker, with data of the store."""

    id: str
    at: float  # when the export began, seconds since the epoch
    who: str  # name of the person or job that exported
    path: str  # absolute path, or `-` for stdout
    format: str
    trajectories: int  # number of trajectories with data in the file


class ExportNote:
    """The record of an export in progress: `Transfers.note_export` makes it, and the exporter adds trajectories."""

    def __init__(self, database: Database, export_id: str) -> None:
        self._database = database
        self.id = export_id
        self.trajectories = 0

    def add(self, trajectory_ids: Iterable[str]) -> None:
        """Record, before the data is written, that the export will hold these trajectories; known ones are ignored."""
        keys = set(trajectory_ids)
        if not keys:
            return
        table = tables.export_members
        with self._database.write(durable=True) as connection:
            query = select(table.c.trajectory_id).where(table.c.export_id == self.id, table.c.trajectory_id.in_(keys))
            new = sorted(keys - set(connection.scalars(query)))  # a run's data may come in several rows of the file
            if new:
                connection.execute(insert(table), [{"trajectory_id": key, "export_id": self.id} for key in new])
        self.trajectories += len(new)


class Transfers(Part):
    """Records exports and imports, and reads and writes the rows that these need besides trajectories."""

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

        The audit log gets only the names of `filters`, because their values may be users' texts. `at_once`: each row
        leaves the machine when it is written, as with a tracker or stdout; then the record stays even if the block
        fails.
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
        query = select(*tables.columns_of(table, Export)).order_by(table.c.at.desc(), table.c.id.desc())
        return tuple(Export(*row) for row in self._rows(query.limit(limit)))

    def groups_of(self, trajectory_ids: Sequence[str]) -> dict[str, JSON]:
        """Return the group of each trajectory, as the JSON object that an exported trajectory contains."""
        groups, runs = tables.groups.c, tables.trajectories.c
        query = select(runs.id, *(groups[name] for name in _OF_GROUP)).join(tables.groups, groups.id == runs.group_id)
        found: dict[str, JSON] = {}
        with self._database.read() as connection:
            for key, *values in rows_in(connection, query, runs.id, trajectory_ids):
                facts = dict(zip(_OF_GROUP, values, strict=True))
                facts["held_out"] = bool(facts["held_out"])  # SQLite gives 0 or 1, and JSON must not
                found[key] = {name: value for name, value in facts.items() if value is not None}
        return found

    def bases(self) -> dict[str, str]:
        """Return the fingerprint of the base model of each policy, by the policy's name."""
        table = tables.policies
        return {row.name: row.base_sha256 for row in self._rows(select(table.c.name, table.c.base_sha256))}

    def add_groups(self, groups: Mapping[str, JSON], *, now: float | None = None) -> None:
        """Put imported trajectories into the groups that they were exported with, as `groups_of` returns them.

        A group that the store has already stays as it is, and so does a trajectory that is in a group already.
        """
        groups = {key: {name: storable(value) for name, value in group.items()} for key, group in groups.items()}
        by_id = {group["id"]: group for group in groups.values()}  # each member brings its group
        if not by_id:
            return
        rows = [{name: group.get(name) for name in _OF_GROUP} for _, group in sorted(by_id.items())]
        scenarios = {group["scenario_key"]: group["held_out"] for group in by_id.values()}
        table = tables.trajectories
        with self._database.write(durable=True) as connection:
            add_scenarios(connection, self._database, scenarios, now)
            connection.execute(self._database.insert(tables.groups).on_conflict_do_nothing(), rows)
            for trajectory_id, group in sorted(groups.items()):
                # A run that is in a group here stays in it: its siblings and scores are here.
                alone = table.c.id == trajectory_id, table.c.group_id.is_(None)
                connection.execute(update(table).where(*alone).values(group_id=group["id"]))

    def note_import(self, path: str, *, who: str, metrics: JSON, now: float | None = None) -> None:
        """Add an audit entry that says which file was imported, by whom, and how many rows it added (`metrics`)."""
        with self._database.write(durable=True) as connection:
            note(connection, who, "import", {"path": path, **metrics}, time.time() if now is None else now)

    def add_policy(self, policy: Policy, *, who: str, detail: JSON, now: float) -> None:
        """Store an imported policy as a candidate, and an audit entry; `ConfigError` if there is one of this name."""
        with self._database.write(durable=True) as connection:
            decide_alone(connection)
            if policy_of(connection, policy.name) is not None:
                raise ConfigError(f"{policy.name} exists already, and a policy never changes; import it again")
            rejected = ", and rejected there" if detail.get("rejected_by") else ""
            insert_policy(connection, policy, who, f"imported, {detail['from']} where it comes from{rejected}")
            note(connection, who, "import policy", detail, now)

    def note_copy(
        self, action: Literal["export policy", "push policy", "pushed policy"], *, who: str, detail: JSON
    ) -> None:
        """Add an audit entry about a copy of a policy that leaves the project, before the copy is made.

        `export policy` is a copy on disk, `push policy` an upload that is to begin, `pushed policy` one that has ended.
        """
        with self._database.write(durable=True) as connection:
            note(connection, who, action, detail, time.time())

    def copies_of(self, policies: Collection[str]) -> list[JSON]:
        """Return the copies of these policies that left the project, oldest first: who made each, when, and where."""
        table = tables.audit.c
        query = select(table.at, table.who, table.detail).where(table.action.in_(("export policy", "push policy")))
        with self._database.read() as connection:
            return [
                {
                    "policy": detail["policy"],
                    "at": at,
                    "who": who,
                    "to": detail.get("directory") or detail["repository"],
                }
                for at, who, detail in connection.execute(query.order_by(table.id))
                if detail["policy"] in policies
            ]

    def _finish(self, export: ExportNote, row: JSON, filters: JSON | None) -> None:
        table = tables.exports
        detail = {"export": export.id, "path": row["path"], "format": row["format"]}
        detail |= {"trajectories": export.trajectories, "filters": sorted(filters or ())}
        with self._database.write(durable=True) as connection:
            connection.execute(update(table).where(table.c.id == export.id).values(trajectories=export.trajectories))
            note(connection, row["who"], "export", detail, row["at"])

    def _forget(self, export: ExportNote) -> None:
        members = tables.export_members
        with self._database.write(durable=True) as connection:
            connection.execute(delete(members).where(members.c.export_id == export.id))
            connection.execute(delete(tables.exports).where(tables.exports.c.id == export.id))


@dataclass(frozen=True, slots=True)
class SentItem:
    """The record that a tracker has an item: a span, a score or a policy's metrics."""

    item: str  # key of the item, unique at the tracker
    digest: str  # hash of the data that was sent. If the hash of the present data differs, the item must be sent again
    trajectory_id: str | None = None  # id of the run that the item belongs to; `None` for a policy's metrics


class Sent(Part):
    """Records which items each tracker has, so that a repeated upload sends only new and changed items."""

    # A note is written after the tracker took the item. A process that is killed in between sends the item once more,
    # but never forgets one.

    def digests(self, target: str, items: Sequence[str]) -> dict[str, str]:
        """Return the digest of those items that the tracker `target` has, as it was when they were sent."""
        table = tables.sent.c
        query = select(table.item, table.digest).where(table.target == target)
        with self._database.read() as connection:
            return {item: digest for item, digest in rows_in(connection, query, table.item, items)}

    def add(self, target: str, items: Sequence[SentItem], *, now: float) -> None:
        """Record that the tracker `target` has these items now; a record of an older version is replaced."""
        if not items:
            return
        rows = [asdict(one) | {"target": target, "at": now} for one in items]
        new = self._database.insert(tables.sent)
        # The trajectory of an item never changes, so it is not replaced.
        changes = {"digest": new.excluded.digest, "at": new.excluded.at}
        with self._database.write(durable=True) as connection:
            connection.execute(
                new.on_conflict_do_update(index_elements=list(tables.sent.primary_key), set_=changes), rows
            )
