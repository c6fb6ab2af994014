"""An open store, and opening one. Imports SQLAlchemy."""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from art_patch._lib.forking import late_import
from art_patch.errors import ConfigError
from art_patch.store.backends.database import Database, Trouble
from art_patch.store.backends.urls import is_postgres, missing_driver
from art_patch.store.write import Writer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from art_patch.store.erasure.rights import Rights
    from art_patch.store.ledger.leases import Lease, Leases
    from art_patch.store.ledger.ledger import Ledger
    from art_patch.store.ledger.transfers import Sent, Transfers
    from art_patch.store.maintain import Maintenance
    from art_patch.store.queries.browse import Browser, Pair
    from art_patch.store.queries.read import Reader
    from art_patch.types import ArmTraffic, Correction


class Store:
    """An open store. Methods are grouped by who uses them: the app only writes, and imports nothing else."""

    def __init__(self, database: Database) -> None:
        """Wrap an open database."""
        self._database = database
        self._writer = Writer(database)
        self.write = self._writer.write

    @cached_property
    def read(self) -> Reader:
        """What the job and the command line read."""
        from art_patch.store.queries.read import Reader

        return Reader(self._database)

    @cached_property
    def ledger(self) -> Ledger:
        """What the job and the operator decide."""
        from art_patch.store.ledger.ledger import Ledger

        return Ledger(self._database)

    @cached_property
    def browse(self) -> Browser:
        """What a person looks for."""
        from art_patch.store.queries.browse import Browser

        return Browser(self._database)

    def corrections(self, trajectory_ids: Sequence[str]) -> dict[str, list[Correction]]:
        """Return what people say the answers of these trajectories should have been, oldest first."""
        from art_patch.store.queries.corrections import corrections_of

        return corrections_of(self._database, trajectory_ids)

    def corrected(self, *, since: float, limit: int) -> tuple[str, ...]:
        """Return the trajectories that were corrected after `since`, newest first, and none that is held out."""
        from art_patch.store.queries.corrections import corrected

        return corrected(self._database, since=since, limit=limit)

    def rewarded_alone(self, *, since: float, limit: int) -> tuple[str, ...]:
        """Return the trajectories in no group that a user or their code scored after `since`, newest first."""
        from art_patch.store.queries.corrections import rewarded_alone

        return rewarded_alone(self._database, since=since, limit=limit)

    def arm_traffic(
        self, *, challenger: str, champion: str, state: Literal["shadow", "canary"], since: float
    ) -> ArmTraffic:
        """Return what was observed of a challenger and its champion since it came into its state."""
        from art_patch.store.queries.arms import arm_traffic

        return arm_traffic(self._database, challenger=challenger, champion=champion, state=state, since=since)

    def answered_by_both(self, a: str | None, b: str | None, *, limit: int) -> tuple[int, tuple[Pair, ...]]:
        """Return how many prompts two policies (`None`: upstream) both answered, and the newest of them."""
        from art_patch.store.queries.browse import answered_by_both

        return answered_by_both(self._database, a, b, limit=limit)

    @cached_property
    def leases(self) -> Leases:
        """Who alone may do something, of all machines."""
        from art_patch.store.ledger.leases import Leases

        return Leases(self._database)

    def fenced(self, lease: Lease) -> Store:
        """Return this store for the owner of a lease: every write raises `Busy` once it is not theirs any more."""
        from art_patch.store.ledger.leases import fenced

        return Store(fenced(self._database, lease))

    def note_attempt(self, job: str, *, policy: str, took_s: float, why: str, who: str) -> None:
        """Leave an audit entry of an update that made no policy: its time was spent all the same."""
        from art_patch.store.queries.usage import note_attempt

        note_attempt(self._database, job, policy=policy, took_s=took_s, why=why, who=who)

    @cached_property
    def transfers(self) -> Transfers:
        """What left the store, and what came in."""
        from art_patch.store.ledger.transfers import Transfers

        return Transfers(self._database)

    @cached_property
    def sent(self) -> Sent:
        """What trackers have already."""
        from art_patch.store.ledger.transfers import Sent

        return Sent(self._database)

    @cached_property
    def rights(self) -> Rights:
        """Erasing and keeping."""
        from art_patch.store.erasure.rights import Rights

        return Rights(self._database)

    @cached_property
    def maintain(self) -> Maintenance:
        """What keeps the store small and sound."""
        from art_patch.store.maintain import Maintenance

        return Maintenance(self._database)

    def verify(self) -> list[str]:
        """Return every inconsistency found, in words; empty means sound."""
        from art_patch.store.maintain import verify

        return verify(self._database)

    def close(self) -> None:
        """Close all connections."""
        self._database.close()


def open_store(url: str, *, create: bool = True, project: str | None = None, trouble: Trouble | None = None) -> Store:
    """Open (and migrate) the store at `url`.

    Args:
        url: `sqlite:////absolute/path/store.db` or `postgresql+psycopg://user@host/database`.
        create: make it if it does not exist. Whoever may make it also makes it the project's if it is nobody's.
        project: whose store it has to be. `None` looks at no project: for stores that only one program knows.
        trouble: the app's recorder: told when the store was deleted or replaced while open, or was corrupt and set
            aside. Without it a corrupt file stays where it is.

    Raises:
        ConfigError: if the URL names no database that we know, or its driver is not installed.
        WrongProject: if it is another project's.
        StoreError: if it cannot be opened, is not a store, or is missing and `create` is false.
        StoreTooNew: if a newer release wrote it.
    """
    return Store(open_database(url, create=create, project=project, trouble=trouble))


def open_database(
    url: str, *, create: bool = True, project: str | None = None, trouble: Trouble | None = None
) -> Database:
    """Open and migrate.

    Args:
        url: `sqlite:////absolute/path/store.db` or `postgresql+psycopg://user@host/database`.
        create: make the store if it does not exist, and the project's if it is nobody's.
        project: whose store it has to be; `None` does not look.
        trouble: who is told that the store was made anew; with it, a corrupt file of ours is set aside.

    Raises:
        ConfigError: if the URL names no database that we know, or its driver is not installed.
        WrongProject: if it is another project's.
        StoreError: if it cannot be opened, is not a store, or does not exist and `create` is false.
        StoreTooNew: if a newer release wrote it.
    """
    if not is_postgres(url):
        with late_import():
            from art_patch.store.backends.sqlite import SqliteDatabase
        return SqliteDatabase(url, create=create, project=project, trouble=trouble)
    with late_import():
        try:
            import_module("psycopg")
        except ImportError as error:
            raise ConfigError(missing_driver(url, error)) from None
        from art_patch.store.backends.postgres import PostgresDatabase
    return PostgresDatabase(url, create=create, project=project, trouble=trouble)
