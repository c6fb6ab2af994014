"""The search index: which words each call says. The job, the server or a search extends it, never the app.

An entry is one call: the words of its answers and of what was new in its prompt, which is all behind the last answer
before it, without system prompts. What a conversation repeats has been indexed with the call that said it.

An entry's id is when its call began, in milliseconds, or the next free number. So the newest entries have the largest
ids, whenever they were made. The table `search_calls` names the call of each entry. On PostgreSQL it has the words,
too; on SQLite each project has an FTS5 table for them, which keeps no text (`content=''`) and no places of words
(`detail=none`), and is made with the first entry.

Rules. Apps may write calls late, so an extension looks again at the last `OVERLAP_S` seconds, and a `thorough` one at
everything. Whoever deletes calls calls `forget` first, in the same transaction. FTS5 deletes an entry only if it is
told the words again, which come from the same messages, and keeps them in its pages until these are merged; so a
deletion ends with `merge`. On PostgreSQL, `merge` builds the index anew, because it never drops a word.

A word is a run of letters and digits, in small letters and without accents, cut after `LONGEST` characters. A character
of Chinese, Japanese or Korean is a word of its own, because these languages put no spaces between words. The name of
a tool that an answer calls is a word that no text has. A call has words of `_MOST_BYTES` at most, its newest ones:
PostgreSQL keeps no more, and says nothing. If these rules change, the words of existing entries cannot be deleted any
more: also change `TABLE`, so that a new index is made.
"""

import re
import time
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import sqlalchemy as sa
from sqlalchemy import ARRAY, Connection, Text, and_, bindparam, delete, exists, func, or_, select, text

from art_patch._lib.ids import new_id
from art_patch.errors import ConfigError
from art_patch.store.backends.database import Database, decide_alone
from art_patch.store.ledger.decisions import control_of, set_control
from art_patch.store.queries.loading import rows_in
from art_patch.store.schema import tables
from art_patch.store.schema.codec import expand, parse
from art_patch.trajectories import ROOT
from art_patch.types import JSON

LONGEST = 32  # characters of a word
_MOST_CHARACTERS = 200_000  # of a message: what stands behind them is not found
_MOST_BYTES = 500_000  # of a call's words
_LONGEST_TOOL = 200  # characters of a tool's word
_MOST_WORDS = 100  # of a query
_EAST = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
_WORD = re.compile(rf"[{_EAST}]|[^\W_{_EAST}]+")
_ITEM = re.compile(r'"([^"]*)"|(\S+)')
_TOOL = "\u2192"  # no letter, so no text has a word that begins with it


def words_of(text: str) -> list[str]:
    """Return the words of a text in their order."""
    if text.isascii():
        text = text.lower()
    else:
        apart = unicodedata.normalize("NFKD", text.casefold())
        text = unicodedata.normalize("NFC", "".join(one for one in apart if not unicodedata.combining(one)))
    return [word[:LONGEST] for word in _WORD.findall(text)]


def tool_word(name: str) -> str:
    """Return the word that says that a tool of this name was called."""
    return _TOOL + "\u00b7".join(words_of(name[:_MOST_CHARACTERS]))[:_LONGEST_TOOL]


def texts_of(message: JSON) -> list[str]:
    """Return the texts of a message: its content, its refusal, and names and arguments of the tools that it calls."""
    content: Any = message.get("content")
    parts = cast("list[Any]", content) if isinstance(content, list) else [{"text": content}]
    found = [_pairs(part).get("text") for part in parts] + [message.get("refusal")]
    for function in _functions(message):
        found += [function.get("name"), function.get("arguments"), function.get("input")]
    return [text[:_MOST_CHARACTERS] for text in found if isinstance(text, str) and text]


def index_words(messages: Sequence[JSON]) -> list[str]:
    """Return the words of a call's messages, each once, with those of the tools that they call."""
    found: dict[str, None] = {}
    left = _MOST_BYTES
    for message in reversed(messages):
        names = (function.get("name") for function in _functions(message))
        said = [tool_word(name) for name in names if isinstance(name, str)]
        for word in chain(said, chain.from_iterable(map(words_of, texts_of(message)))):
            if word not in found:
                if (left := left - len(word.encode())) < 0:
                    return list(found)
                found[word] = None
    return list(found)


class Wanted(NamedTuple):
    """What a call must say: all `words`, a word that begins with each of `beginnings`, and each of `phrases`."""

    words: tuple[str, ...] = ()
    beginnings: tuple[str, ...] = ()
    phrases: tuple[str, ...] = ()  # words with a space around each, in their order

    def is_in(self, messages: Iterable[JSON]) -> bool:
        """Return whether some messages have each phrase, in one text."""
        texts = [f" {' '.join(words_of(text))} " for message in messages for text in texts_of(message)]
        return all(any(phrase in text for text in texts) for phrase in self.phrases)


def wanted(query: str) -> Wanted:
    """Return what a person looks for: words, beginnings (`refu*`) and phrases (`"your refund"`); else `ConfigError`."""
    words: dict[str, None] = {}
    beginnings: list[str] = []
    phrases: list[str] = []
    for quoted, plain in _ITEM.findall(query):
        found = words_of(quoted or plain)
        if plain.endswith("*") and found:
            beginnings.append(found.pop())
        words |= dict.fromkeys(found)
        if len(found) > 1:  # such as an address or a number with hyphens, too
            phrases.append(f" {' '.join(found)} ")
    if len(words) + len(beginnings) > _MOST_WORDS:
        raise ConfigError(f"{query!r:.70} has more than {_MOST_WORDS} words; search for fewer")
    if not words and not beginnings:
        raise ConfigError(f"{query!r:.70} has no word to search for; give letters or digits")
    return Wanted(tuple(words), tuple(beginnings), tuple(phrases))


def _functions(message: JSON) -> list[JSON]:
    """Return the functions that a message calls, whatever shape a provider gave it."""
    calls: Any = message.get("tool_calls")
    given = [_pairs(call) for call in cast("list[Any]", calls)] if isinstance(calls, list) else []
    found = [_pairs(call.get("function") or call.get("custom")) for call in given]
    return [*found, _pairs(message.get("function_call"))]


def _pairs(value: Any) -> JSON:
    return cast("JSON", value) if isinstance(value, Mapping) else {}


# --- the index ---

TABLE = "search_words"
OVERLAP_S = 900.0  # a call that ends so long after it began is found by a `thorough` extension only
MOST_COUNTED = 100_000  # calls without an entry; beyond that it is said that there are more

_AT_ONCE = 200  # calls in one transaction
_PART = 20  # calls whose messages are in memory at once: each may have megabytes
_PAGES = 32  # of FTS5, merged in one transaction
_DEEPEST = 1_000  # messages that a prompt may have behind its last answer

# Rows of `control`: up to which start of a call the index was extended; whether deleted words wait for `merge`.
_UNTIL, _UNMERGED = "search_until", "search_unmerged"

_C, _CHOICES, _NODES, _S = tables.calls.c, tables.choices.c, tables.nodes.c, tables.search_calls.c
_ADD = "INSERT INTO {0} (rowid, words) VALUES (?, ?)"
_FORGET = "INSERT INTO {0} ({0}, rowid, words) VALUES ('delete', ?, ?)"
_MERGE = "INSERT INTO {0} ({0}, rank) VALUES ('merge', ?)"
_MAKE = (
    "CREATE VIRTUAL TABLE IF NOT EXISTS {0} USING fts5 (words, content='', detail=none, columnsize=0, tokenize='ascii')"
)


def words_table(database: Database) -> sa.Table:
    """Return the FTS5 table of the open project, whose rows have the ids of its entries."""
    name = f"{TABLE}_{database.scope['project_id']}"
    return sa.Table(name, sa.MetaData(), sa.Column("rowid", sa.Integer), sa.Column("words", Text))


def _words_table(connection: Connection) -> str:
    """Return the name of that table, in a write transaction."""
    return f"{TABLE}_{connection.get_execution_options()['project_id']}"


def is_there(connection: Connection, database: Database) -> bool:
    """Return whether there may be an index: on SQLite the first extension makes it."""
    if connection.dialect.name != "sqlite":
        return True
    named = {"name": words_table(database).name}
    return bool(connection.scalar(text("SELECT count(*) FROM sqlite_master WHERE name = :name"), named))


def can_be_made(connection: Connection) -> bool:
    """Return whether the database can have an index: some builds of SQLite lack FTS5."""
    if connection.dialect.name != "sqlite":
        return True
    return bool(connection.scalar(text("SELECT count(*) FROM pragma_module_list WHERE name = 'fts5'")))


def new_messages(connection: Connection, call_ids: Sequence[str]) -> Iterator[tuple[str, list[JSON]]]:
    """Yield what each of these calls adds to its conversation: the prompt behind the last answer, and the answers."""
    for begin in range(0, len(call_ids), _PART):
        yield from _new_messages(connection, call_ids[begin : begin + _PART]).items()


def _new_messages(connection: Connection, call_ids: Sequence[str]) -> dict[str, list[JSON]]:
    found: dict[str, list[JSON]] = {key: [] for key in call_ids}
    asked: dict[bytes, list[str]] = {}
    for key, prompt in rows_in(connection, select(_C.id, _C.prompt), _C.id, call_ids):
        asked.setdefault(prompt, []).append(key)
    answers = select(_CHOICES.call_id, _CHOICES.answer).order_by(_CHOICES.index)
    answered = [(key, node) for key, node in rows_in(connection, answers, _CHOICES.call_id, call_ids)]
    bodies = {node: body for node, _, body in _nodes(connection, {node for _, node in answered})}
    for _ in range(_DEEPEST):  # level by level: one query for all calls, instead of one walk for each
        above: dict[bytes, list[str]] = {}
        for node, parent, message in _nodes(connection, asked.keys() - {ROOT}):
            if message.get("role") == "assistant":
                continue
            if message.get("role") not in ("system", "developer"):
                for key in asked[node]:
                    found[key].append(message)
            above.setdefault(parent, []).extend(asked[node])
        asked = above
        if not asked.keys() - {ROOT}:
            break
    for messages in found.values():
        messages.reverse()
    for key, node in answered:
        if node in bodies:
            found[key].append(bodies[node])
    return found


def _nodes(connection: Connection, ids: Any) -> Iterator[tuple[bytes, bytes, JSON]]:
    for node, parent, body in rows_in(
        connection, select(_NODES.id, _NODES.parent, _NODES.body), _NODES.id, sorted(ids)
    ):
        yield node, parent, parse(expand(body))


def extend(
    database: Database, *, seconds: float = float("inf"), thorough: bool = False, now: float | None = None
) -> int:
    """Add the calls that the index lacks, oldest first, for about so many seconds; return how many were added."""
    until, added = time.monotonic() + seconds, 0
    with database.read() as connection:
        if not can_be_made(connection):
            return 0
        unmerged = control_of(connection, _UNMERGED)
        begin = 0.0 if thorough else float(control_of(connection, _UNTIL) or 0.0) - OVERLAP_S
    if unmerged:  # of a deletion that was killed
        merge(database)
    last = (begin, "")
    while time.monotonic() < until:
        with database.read() as connection:
            page = _missing(connection, last)
            said = new_messages(connection, [key for key, _ in page])
            words = {key: index_words(messages) for key, messages in said}
        if not page:
            break
        entries = {key: (at, words[key]) for key, at in page}
        last = page[-1][1], page[-1][0]
        with database.write() as connection:
            decide_alone(connection)  # two processes may extend it at once
            added += _add(connection, entries)
            # A wrong clock must not move it into the future, or no later call would be looked for.
            reached = min(last[0], time.time() if now is None else now)
            if reached > float(control_of(connection, _UNTIL) or 0.0):
                set_control(connection, _UNTIL, repr(reached))
    return added


def _missing(connection: Connection, after: tuple[float, str]) -> list[tuple[str, float]]:
    at, key = after
    behind = or_(_C.started_at > at, and_(_C.started_at == at, _C.id > key))
    query = select(_C.id, _C.started_at).where(_C.started_at >= at, behind, ~exists().where(_S.call_id == _C.id))
    return [tuple(row) for row in connection.execute(query.order_by(_C.started_at, _C.id).limit(_AT_ONCE))]


def _add(connection: Connection, entries: dict[str, tuple[float, list[str]]]) -> int:
    """Add the entries of calls that are still in the store, and have none; return how many."""
    keys = list(entries)
    # Looked at again inside the transaction: an erasure may have deleted them, or another process added them.
    here = {key for (key,) in rows_in(connection, select(_C.id), _C.id, keys)}
    here -= {key for (key,) in rows_in(connection, select(_S.call_id), _S.call_id, keys)}
    chosen = [key for key in keys if key in here]
    if not chosen:
        return 0
    ids = _free(connection, [max(0, int(entries[key][0] * 1_000)) for key in chosen])
    sqlite = connection.dialect.name == "sqlite"
    words = [entries[key][1] for key in chosen]
    rows: list[dict[str, Any]] = [{"id": id, "call_id": key} for id, key in zip(ids, chosen, strict=True)]
    if sqlite:
        connection.execute(tables.search_calls.insert(), rows)
        table = _words_table(connection)
        connection.exec_driver_sql(_MAKE.format(table))
        connection.exec_driver_sql(
            _ADD.format(table), [(id, " ".join(said)) for id, said in zip(ids, words, strict=True)]
        )
    else:
        lexemes = func.array_to_tsvector(sa.cast(bindparam("said"), ARRAY(Text)))
        rows = [row | {"said": said} for row, said in zip(rows, words, strict=True)]
        connection.execute(tables.search_calls.insert().values(words=lexemes), rows)
    return len(rows)


def _free(connection: Connection, wanted: Sequence[int]) -> list[int]:
    """Return for each number the next one that no entry has, in ascending order."""
    found: list[int] = []
    taken: set[int] = set()
    looked_until = number = -1
    for each in wanted:
        number = max(each, number + 1)
        while number > looked_until or number in taken:
            if number > looked_until:
                first, looked_until = number, number + _AT_ONCE
                taken = set(connection.scalars(select(_S.id).where(_S.id.between(first, looked_until))))
            else:
                number += 1
        found.append(number)
    return found


def forget(connection: Connection, call_ids: Sequence[str]) -> None:
    """Delete the entries of these calls, whose messages are still in the store, and note that `merge` has to follow."""
    ids = {key: id for id, key in rows_in(connection, select(_S.id, _S.call_id), _S.call_id, call_ids)}
    if not ids:
        return
    if connection.dialect.name == "sqlite":
        said = new_messages(connection, list(ids))
        gone = [(ids[key], " ".join(index_words(messages))) for key, messages in said]
        connection.exec_driver_sql(_FORGET.format(_words_table(connection)), gone)
    connection.execute(delete(tables.search_calls).where(_S.call_id.in_(list(ids))))
    set_control(connection, _UNMERGED, new_id())  # another one each time: a merge that has begun may miss these words


def merge(database: Database) -> None:
    """Take the words of deleted entries out of the index's pages, in short transactions; nothing if none wait."""
    while True:
        with database.read() as connection:
            deleted = control_of(connection, _UNMERGED)
            sqlite, whole = connection.dialect.name == "sqlite", is_there(connection, database)
        if not deleted or not (_merge_pages(database, whole) if sqlite else _build_anew(database)):
            return
        with database.write(durable=True) as connection:
            decide_alone(connection)
            if control_of(connection, _UNMERGED) == deleted:
                set_control(connection, _UNMERGED, "")


def _merge_pages(database: Database, goes_on: bool) -> bool:
    pages = -_PAGES  # a negative number begins a merge of everything
    while goes_on:
        began = time.perf_counter()
        with database.write(durable=True) as connection:
            before = connection.scalar(text("SELECT total_changes()")) or 0
            connection.exec_driver_sql(_MERGE.format(_words_table(connection)), (pages,))
            after = connection.scalar(text("SELECT total_changes()")) or 0
        # The command itself counts as one change.
        goes_on, pages = pages < 0 or after - before >= 2, _PAGES
        time.sleep(max(0.002, min(time.perf_counter() - began, 0.1)))  # as long as writers had to wait
    return True


def _build_anew(database: Database) -> bool:
    """Build PostgreSQL's index anew; `False` if this user may not: the owner's next deletion or extension does it."""
    index = "to_regclass('search_calls_words')"
    with database.write(durable=True) as connection:
        owns = text(f"SELECT {index}::text FROM pg_class WHERE oid = {index} AND pg_has_role(relowner, 'USAGE')")
        if (name := connection.scalar(owns)) is not None:
            connection.exec_driver_sql(f"SET LOCAL statement_timeout = 0; REINDEX INDEX {name}")
    return name is not None


def lag(connection: Connection) -> int:
    """Return how many calls the index lacks of those after the newest one that it has; at most `MOST_COUNTED` + 1."""
    since = float(control_of(connection, _UNTIL) or -1.0)
    missing = select(sa.literal(1)).where(_C.started_at > since, ~exists().where(_S.call_id == _C.id))
    return connection.scalar(select(func.count()).select_from(missing.limit(MOST_COUNTED + 1).subquery())) or 0


def drop(database: Database) -> None:
    """Delete the project's entries, with their words."""
    with database.read() as connection:
        if connection.scalar(select(_S.id).limit(1)) is None:
            return
    with database.write(durable=True) as connection:
        decide_alone(connection)
        if connection.dialect.name == "sqlite":
            connection.exec_driver_sql(f"DROP TABLE IF EXISTS {_words_table(connection)}")
        connection.execute(delete(tables.search_calls))
        set_control(connection, _UNTIL, "")
        set_control(connection, _UNMERGED, "" if connection.dialect.name == "sqlite" else new_id())
    merge(database)
