"""Opens a store: `Store`. The app only writes, so the parts that read or decide are imported at their first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from art_patch._lib.forking import late_import
from art_patch._lib.lazy import TYPE_CHECKING, lazily
from art_patch.errors import ConfigError
from art_patch.store.backends.database import Database, Trouble
from art_patch.store.backends.urls import is_postgres, missing_driver
from art_patch.store.write import Writer

if TYPE_CHECKING:
    from art_patch.store.erasure.rights import Rights
    from art_patch.store.ledger.consent import Consent
    from art_patch.store.ledger.gate_answers import GateAnswers
    from art_patch.store.ledger.leases import Lease, Leases, Servers
    from art_patch.store.ledger.ledger import Ledger
    from art_patch.store.ledger.notices import Notices
    from art_patch.store.ledger.transfers import Sent, Transfers
    from art_patch.store.maintain import Maintenance
    from art_patch.store.queries.browse import Browser
    from art_patch.store.queries.changes import Audit, Changes
    from art_patch.store.queries.evidence import Evidence
    from art_patch.store.queries.groups import Groups
    from art_patch.store.queries.read import Reader
    from art_patch.store.queries.series import Series
    from art_patch.store.queries.usage import Reports
    from art_patch.store.search import Search
else:
    __getattr__ = lazily()


class Store:
    """An open store. `write` adds a batch of records; the other operations are grouped into parts, such as `ledger`."""

    read: Reader  # queries that return trajectories, groups and counts, for the job and the command line
    browse: Browser  # queries for lists of trajectories that a person reads, with filters and pages
    search: Search  # finds trajectories by their text, in an index of words
    evidence: Evidence  # queries for the calls and scores of a shadow or canary test, and what users said about runs
    reports: Reports  # counts of calls, runs, costs and groups, for `art-patch report` and `art-patch groups`
    changes: Changes  # what tells that something has changed, for pages that are open
    series: Series  # numbers by day, by promotion and by scenario
    groups: Groups  # lists of groups, what each taught, and what people review
    audit: Audit  # who has changed what
    ledger: Ledger  # reads and changes groups, policies and the route: the decisions of the job and the operator
    gate_answers: GateAnswers  # what both policies of a gate answered, for people
    consent: Consent  # says whose runs may be learned from
    leases: Leases  # locks over all machines, so that for example only one process runs a cycle
    servers: Servers  # the model servers that run, so that one takes the route over when another one ends
    notices: Notices  # says which decisions were not made known yet to people outside
    transfers: Transfers  # records which data was exported to a file or a tracker, and which was imported
    sent: Sent  # records which items a tracker has already, so that an upload sends only new and changed ones
    rights: Rights  # erases a person's data, and deletes old trajectories (retention)
    maintain: Maintenance  # reports the sizes of the database, rewrites it without free space, and makes backups

    def __init__(self, database: Database) -> None:
        self._database = database
        self.write = Writer(database).write  # the writer keeps state between batches, so there is one for each store

    if not TYPE_CHECKING:  # else misspelt names would pass the checker

        def __getattr__(self, name: str) -> Any:
            """Make a part of the store when it is first used."""
            if name not in Store.__annotations__:
                raise AttributeError(f"a store has no {name!r}")
            # An app that only writes must not pay for the queries of the job.
            found = __getattr__(Store.__annotations__[name])(self._database)
            setattr(self, name, found)  # so that Python finds it by itself next time
            return found

    def fenced(self, lease: Lease) -> Store:
        """Return this store for the owner of a lease; its writes raise `Busy` once the lease has another owner."""
        from art_patch.store.ledger.leases import fenced

        # A store of its own: only this one's writes are fenced.
        return Store(fenced(self._database, lease))

    def verify(self) -> list[str]:
        """Check the whole store, and return one sentence for each inconsistency; an empty list means there is none."""
        return self.maintain.verify()

    def close(self) -> None:
        """Close all connections of the store."""
        self._database.close()


def open_store(url: str, *, create: bool = True, project: str | None = None, trouble: Trouble | None = None) -> Store:
    """Open a store, and migrate it if an earlier release made it.

    Args:
        url: `sqlite:////absolute/path/store.db`, or `postgresql+psycopg://user:password@host:5432/database`, whose
            query may hold any other parameter of libpq.
        create: make the store if it is missing, and add `project` to it if it is new.
        project: the project whose rows are read and written; `None` is the only one of the store.
        trouble: called when a store had to be made again. With it, a corrupt SQLite file is renamed and a new store
            begins; without it, a corrupt file stays as it is and raises `StoreError`. An app's recorder gives it, so
            it also writes to a store of a newer release that only added to the schema.

    Raises:
        ConfigError: if the URL names neither SQLite nor PostgreSQL, or the driver is not installed.
        WrongProject: if the store has other projects only, and `create` is false.
        StoreError: if it cannot be opened, is not a store, was made by an unreleased version, or is missing and
            `create` is false.
        StoreTooNew: if a newer release made it, but see `trouble`.
    """
    # Imported late and under `late_import`: a fork in another thread must not copy a half-made module.
    with late_import():
        if not is_postgres(url):
            from art_patch.store.backends.sqlite import SqliteDatabase as Opened
        else:
            try:
                import_module("psycopg")
            except ImportError as error:
                raise ConfigError(missing_driver(url, error)) from None
            from art_patch.store.backends.postgres import PostgresDatabase as Opened
    return Store(Opened(url, create=create, project=project, trouble=trouble))
