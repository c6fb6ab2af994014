"""Finds runs by the words that their calls say: `Search`, a part of an open store."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, Table, cast, literal_column, select
from sqlalchemy.dialects.postgresql import TSQUERY

from art_patch.errors import ConfigError
from art_patch.store import search_index as index
from art_patch.store.backends.database import Part
from art_patch.store.queries.browse import Filter, matching
from art_patch.store.queries.loading import rows_in
from art_patch.store.schema import tables
from art_patch.store.search_index import Wanted, tool_word, wanted

MOST = 5_000  # calls that are looked at, the newest ones
MOST_READ = 1_000  # of these, if their messages have to be read for a phrase

_S, _C = tables.search_calls.c, tables.calls.c


@dataclass(frozen=True, slots=True)
class Found:
    """Ids of runs, those with the newest matching call first; whether older ones may match, too; the index's lag."""

    ids: tuple[str, ...]
    more: bool  # more than `MOST` calls match; older ones were not looked at
    lag: int  # newest calls that the index lacks; `index.MOST_COUNTED` + 1 means: more


class Search(Part):
    """The search index: it is extended by the job, the server or before a search, and found in by words."""

    def extend(self, *, seconds: float = float("inf"), thorough: bool = False) -> int:
        """Add calls that the index lacks for about so many seconds; `thorough`: late ones, too. Return how many."""
        return index.extend(self._database, seconds=seconds, thorough=thorough)

    def drop(self) -> None:
        """Delete the project's index. An extension makes it anew."""
        index.drop(self._database)

    def lag(self) -> int:
        """Return how many of the newest calls the index lacks; `MOST_COUNTED` + 1 if there are more."""
        return self._read(index.lag)

    def find(self, queries: Sequence[str], filter: Filter, *, tool: str | None = None) -> Found:
        """Return the runs in which each query is said, and the tool is called, and which match the filter.

        A query is words that one call says, `begin*nings` or `"phrases"`. Two queries may be met by different calls of
        the run. `ConfigError` if a query has no word, or if this SQLite has no full-text search.
        """
        asked = [*map(wanted, queries), *([Wanted((tool_word(tool),))] if tool is not None else [])]
        with self._database.read() as connection:
            if not index.can_be_made(connection):
                raise ConfigError("this SQLite was built without FTS5, so there is no search; use another Python")
            lacks, more, runs = index.lag(connection), False, None
            if index.is_there(connection, self._database):
                for each in asked:
                    found, cut = _runs(connection, each, filter, index.words_table(self._database))
                    more |= cut
                    runs = found if runs is None else [key for key in runs if key in set(found)]
            ids = runs or []
            meets = {key for (key,) in rows_in(connection, matching(filter), tables.trajectories.c.id, ids)}
        return Found(tuple(key for key in ids if key in meets), more, lacks)


def _runs(connection: Connection, asked: Wanted, filter: Filter, words: Table) -> tuple[list[str], bool]:
    """Return the runs of the newest calls that say it, and whether there are older calls that do."""
    most = MOST_READ if asked.phrases else MOST
    entries = list(connection.scalars(_entries(connection, asked, filter.until, words).limit(most + 1)))
    more, entries = len(entries) > most, entries[:most]
    calls = {id: (key, run) for id, key, run in rows_in(connection, _CALLS, _S.id, entries)}
    newest = [calls[id] for id in entries if id in calls]
    if asked.phrases:
        newest = list(_with_phrases(connection, asked, newest))
    return list(dict.fromkeys(run for _, run in newest)), more


_CALLS = select(_S.id, _S.call_id, _C.trajectory_id).join(tables.calls, _C.id == _S.call_id)


def _entries(connection: Connection, asked: Wanted, until: float | None, words: Table) -> Select[Any]:
    """Return the query for the ids of the entries that have all words, newest first."""
    if connection.dialect.name == "sqlite":
        given = [f'"{word}"' for word in asked.words] + [f'"{word}" *' for word in asked.beginnings]
        query: Select[Any] = select(words.c.rowid).where(literal_column(words.name).op("MATCH")(" ".join(given)))
        id = words.c.rowid
    else:
        id = _S.id
        given = [f"'{word}'" for word in asked.words] + [f"'{word}':*" for word in asked.beginnings]
        query = select(id).where(_S.words.op("@@")(cast(" & ".join(given), TSQUERY)))
    if until is not None:  # the entries of a run that ended before are older, too
        query = query.where(id < int(until * 1_000))
    return query.order_by(id.desc())


def _with_phrases(connection: Connection, asked: Wanted, calls: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    runs = dict(calls)
    for key, messages in index.new_messages(connection, list(runs)):
        if asked.is_in(messages):
            yield key, runs[key]
