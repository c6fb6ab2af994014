"""What became of the app's runs in grouping, for `art-patch groups`. Two short read transactions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import func, select

from art_patch.store.backends.database import Database
from art_patch.store.schema import tables
from art_patch.types import COPIES

SOURCES: Mapping[str, str] = {"in spans": "sibling_spans", "resampled": "resampled"}
"""State of the group that holds the run whose copies are siblings elsewhere -> how those came about."""


@dataclass(frozen=True, slots=True)
class GroupStats:
    """The groups of a store.

    Attributes:
        states: how many groups are in each state; those that only hold the source of copies are not counted.
        held_out: how many of them are kept for the gate.
        ways: how many groups came about in each way.
        sizes: how many groups have so many siblings.
        runs: how many of the app's own runs are in groups, or have copies in groups, of each way.
        all_runs: how many runs the app made.
    """

    states: Mapping[str, int]
    held_out: int
    ways: Mapping[str, int]
    sizes: Mapping[int, int]
    runs: Mapping[str, int]
    all_runs: int


def group_stats(database: Database) -> GroupStats:
    """Count the groups of a store, and the runs that are in them."""
    groups, runs = tables.groups, tables.trajectories
    own = runs.c.origin.not_in(COPIES)
    query = (
        select(groups.c.state, groups.c.how, groups.c.held_out, func.count(runs.c.id), func.count().filter(own))
        .join_from(groups, runs, runs.c.group_id == groups.c.id)
        .group_by(groups.c.id, groups.c.state, groups.c.how, groups.c.held_out)
    )
    with database.read() as connection:
        rows = connection.execute(query).all()
        all_runs = connection.scalar(select(func.count()).select_from(runs).where(own)) or 0
    states: Counter[str] = Counter()
    ways: Counter[str] = Counter()
    sizes: Counter[int] = Counter()
    in_groups: Counter[str] = Counter()
    held = 0
    for state, how, held_out, size, own_runs in rows:
        in_groups[SOURCES.get(state, how)] += own_runs
        if state not in SOURCES:
            states[state] += 1
            ways[how] += 1
            sizes[size] += 1
            held += held_out
    return GroupStats(
        dict(states), held, dict(ways), dict(sorted(sizes.items())), {k: n for k, n in in_groups.items() if n}, all_runs
    )
