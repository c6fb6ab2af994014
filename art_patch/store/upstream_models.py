"""Which models answered for upstream, and since when: a provider may let an alias mean another model one day.

In: the calls of a batch, within the writer's transaction. Out: a row of `upstream_models` for each pair of a model that
the app asked for and a model that answered, when the pair is first seen. Only answers count that the app itself got
from upstream. What this process knows costs no statement, so nearly every batch costs none.

What is noted is bounded, whatever a server says. Some servers send a new fingerprint with every answer: after
`MOST_FINGERPRINTS` models that answered for one name, only a model with another name is noted, without its fingerprint.
Processes that note at once may exceed a bound by a few rows.

The first model that answered for a name has replaced none. A model that was seen before changes nothing when it comes
back, so a provider that alternates between models or fingerprints causes no change after both were seen. Nor does an
answer without a fingerprint, or the first fingerprint of a model: some APIs of a provider send none.
"""

from collections import defaultdict
from collections.abc import Iterable

from sqlalchemy import Connection, distinct, func, select

from art_patch.store.backends.database import Database
from art_patch.store.rows import storable
from art_patch.store.schema import tables
from art_patch.types import UPSTREAM, Call, Record, UpstreamChange

MOST_MODELS = 1_000  # of a project: names that the app asks for
MOST_ANSWERED = 64  # models for each of these
MOST_FINGERPRINTS = 16
_LENGTH = 200  # an index of PostgreSQL refuses a text of a few thousand characters

_M = tables.upstream_models.c

# Model that the app asked for -> models that answered.
Known = dict[str, frozenset[str]]


class UpstreamModels:
    """Notes the models of upstream, and remembers in `known` which ones are in the store."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.known: Known = {}
        self._is_full = False

    def forget(self) -> None:
        """Ask the store anew, because it may be another one."""
        self.known, self._is_full = {}, False

    def note(self, connection: Connection, records: Iterable[Record]) -> Known:
        """Insert what is new in the caller's transaction; after its commit the caller adds the result to `known`."""
        first: dict[tuple[str, str], float] = {}
        for call in records:
            if not isinstance(call, Call) or call.policy is not UPSTREAM or not call.answered_by:
                continue
            if call.status != "ok" or call.shadow_of is not None:
                continue
            requested, answered = (storable(name)[:_LENGTH] for name in (call.requested_model, call.answered_by))
            known = self.known.get(requested)
            if known is None or _to_note(known, answered) is not None:
                key = requested, answered
                first[key] = min(call.started_at, first.get(key, call.started_at))
        return self._insert(connection, first) if first else {}

    def _insert(self, connection: Connection, first: dict[tuple[str, str], float]) -> Known:
        asked = sorted({requested for requested, _ in first})
        found: dict[str, set[str]] = {}
        # Other processes may have noted them.
        for requested, answered in connection.execute(
            select(_M.requested_model, _M.answered_by).where(_M.requested_model.in_(asked))
        ):
            found.setdefault(requested, set()).add(answered)
        room = 0
        if len(found) < len(asked) and not self._is_full:
            room = MOST_MODELS - (connection.scalar(select(func.count(distinct(_M.requested_model)))) or 0)
        rows: list[dict[str, object]] = []
        for (requested, answered), at in sorted(first.items(), key=lambda item: (item[1], item[0])):
            if requested not in found:
                if room <= 0:
                    self._is_full = True
                    continue
                room -= 1
            known = found.setdefault(requested, set())
            name = _to_note(known, answered)
            if name is not None:
                known.add(name)
                rows.append({"requested_model": requested, "answered_by": name, "first_seen_at": at})
        if rows:
            rows.sort(key=lambda row: (row["requested_model"], row["answered_by"]))
            connection.execute(self._database.insert(tables.upstream_models).on_conflict_do_nothing(), rows)
        return {requested: frozenset(names) for requested, names in found.items()}


def _to_note(known: Iterable[str], answered: str) -> str | None:
    """Return what to note of a model that answered, beside those that are `known`; `None` if it is nothing new."""
    known = frozenset(known)
    if answered in known:
        return None
    if len(known) < MOST_FINGERPRINTS:
        return answered
    name = answered.partition(" ")[0]
    is_known = len(known) >= MOST_ANSWERED or any(each.partition(" ")[0] == name for each in known)
    return None if is_known else name


def newest_change(connection: Connection, *, until: float | None = None) -> UpstreamChange | None:
    """Return the newest change; with `until`, of those that are not later. `None` if there was none."""
    query = select(_M.requested_model, _M.answered_by, _M.first_seen_at)
    query = query.order_by(_M.first_seen_at, _M.requested_model, _M.answered_by)
    if until is not None:
        query = query.where(_M.first_seen_at <= until)
    last: dict[str, str] = {}
    fingerprints: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    newest: UpstreamChange | None = None
    for requested, answered, at in connection.execute(query):
        name, _, fingerprint = answered.partition(" ")
        is_known = (requested, name) in fingerprints
        of_it = fingerprints[requested, name]
        is_other = bool(fingerprint and of_it) if is_known else requested in last
        if fingerprint:
            of_it.add(fingerprint)
        if is_other:
            newest = UpstreamChange(requested, last[requested], answered, at)
        last[requested] = answered
    return newest
