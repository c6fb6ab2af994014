"""The store: every call, trajectory, group, score and policy, in one SQLite file.

`open_store(url)` gives a `Store`. The app's writer thread calls `write`. The job reads trajectories, stores groups and
scores, and changes the states of policies. `art-patch serve` writes the route, which tells the apps where to send
calls. docs/pages/reference/tables.md describes the tables and gives the reasons for design decisions.

Importing the package does not import SQLAlchemy, so that `patch()` reads the route without its delay of half a second.
"""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.store.backends.files import DEFAULT_NAME, WITH_TRAFFIC
    from art_patch.store.backends.urls import (
        absolute_url, is_postgres, missing_driver, postgres_parameters, sqlite_path, waits_for_network,
        without_password,
    )
    from art_patch.store.erasure.rights import Erasure
    from art_patch.store.ledger.gate_answers import GateTurn
    from art_patch.store.ledger.leases import Lease, Leases, Server, Servers, lost
    from art_patch.store.ledger.ledger import Ledger
    from art_patch.store.ledger.route import read_route
    from art_patch.store.ledger.transfers import ExportNote, SentItem
    from art_patch.store.queries.browse import PAGE, Cursor, Filter, GroupFacts, Pair, Sort, Summary
    from art_patch.store.queries.changes import Entry
    from art_patch.store.queries.evidence import CONTROL_S, Lesson
    from art_patch.store.queries.groups import GroupFilter, GroupLine, Taught
    from art_patch.store.queries.read import APPS_LIVE_S
    from art_patch.store.queries.series import Day, Promotion, Scenario, Totals
    from art_patch.store.queries.usage import SOURCES, Learned
    from art_patch.store.schema.tables import HEAD
    from art_patch.store.search import Found
    from art_patch.store.search_index import MOST_COUNTED
    from art_patch.store.store import Store, open_store
else:
    __getattr__ = lazily()
