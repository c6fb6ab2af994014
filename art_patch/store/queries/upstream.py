"""Reads when upstream's models changed: when a model first answered in the place of another one.

The first model that answered for a name has replaced none. A model that was seen before changes nothing when it comes
back, so a provider that alternates between models or fingerprints causes no change after both were seen. Nor does an
answer without a fingerprint, or the first fingerprint of a model: some APIs of a provider send none.
"""

from collections import defaultdict

from sqlalchemy import Connection, select

from art_patch.store.schema import tables
from art_patch.types import UpstreamChange

_M = tables.upstream_models.c


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
