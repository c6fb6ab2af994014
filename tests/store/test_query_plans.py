"""No statement reads a whole project to find a run, a group or a call in it: the databases say how they would do it."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event

from art_patch.errors import ArtPatchError
from art_patch.store import Store, open_store
from art_patch.store.schema import tables
from art_patch.store.schema.codec import squeeze
from tests.support.crossing import MARK, READS, WRITES, fill
from tests.support.postgres import Execute

SMALL = {
    "agents", "apps", "audit", "control", "exports", "leases", "policies", "projects", "promotions", "upstream_models",
    "withdrawals",
}  # fmt: skip
"""Tables that do not grow with the traffic."""

READ_WHOLE = {
    *{("read.counts", table) for table in ("calls", "trajectories", "scenarios", "scores", "groups", "judgements")},
    *{("reports.groups", table) for table in ("trajectories", "groups")},
    *{("series.scenarios", table) for table in ("trajectories", "groups", "scenarios")},
    ("series.promotions", "judgements"),
    *{("series.totals", table) for table in ("trajectories", "scenarios")},
    *{(f"groups.{name}", "groups") for name in ("page", "to_review")},  # in the order of the key, up to a limit
    ("groups.states", "groups"),  # an index
    ("read.arrivals", "trajectories"),
    # The largest or smallest value is the end of an index, which is read and not the rows before it.
    *{("changes.marks", table) for table in ("calls", "trajectories", "judgements")},
    ("changes.first_call_at", "calls"),
    ("browse.count", "trajectories"),
    ("browse.worst", "trajectories"),  # all are compared
    ("search.drop", "search_calls"),
    ("browse.answered_by_both", "calls"),
    ("browse.resolve", "trajectories"),  # the beginning of an id, in the ids alone
    ("browse.sessions_like", "trajectories"),  # the same, in the session ids
    ("read.recent", "trajectories"),  # in the order of an index, up to a limit
    *{(f"consent.{name}", "trajectories") for name in ("left_out", "spread")},
    ("evidence.corrected", "corrections"),
    ("evidence.rewarded_alone", "trajectories"),  # an index of those without a group
    ("evidence.opinions", "trajectories"),
    *{(f"rights.{name}", "trajectories") for name in ("prune", "prune dry")},
    *{(f"rights.erase {whose}", "calls") for whose in ("a run of theirs", "the same run", "the same user")},  # tools
    ("rights.prune", "calls"),  # tools
    *{("maintain.vacuum", table) for table in ("calls", "nodes", "token_blocks", "blobs")},
}
"""Operations that are about all rows of a table, and for which there is no index."""

Statements = dict[str, tuple[str, Any]]
"""Statement -> the operation that sent it, and its parameters."""


@contextmanager
def statements_of(operation: str, found: Statements) -> Iterator[None]:
    def look(_connection: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, many: bool) -> None:
        if re.match(r"\s*(SELECT|WITH|UPDATE|DELETE)\b", statement) and "pg_" not in statement:
            found.setdefault(statement, (operation, parameters[0] if many else parameters))

    event.listen(Engine, "before_cursor_execute", look)
    try:
        with suppress(ArtPatchError):
            yield
    finally:
        event.remove(Engine, "before_cursor_execute", look)


def plan(connection: Connection, statement: str, parameters: Any) -> list[str]:
    explain = "EXPLAIN QUERY PLAN" if connection.dialect.name == "sqlite" else "EXPLAIN"
    return [row[-1] for row in connection.exec_driver_sql(f"{explain} {statement}", parameters)]


def whole_reads(connection: Connection, found: Statements) -> dict[tuple[str, str], str]:
    """Operations and the tables of which they read all rows of a project, with the plan's words."""
    whole: dict[tuple[str, str], str] = {}
    for statement, (operation, parameters) in found.items():
        for line in plan(connection, statement, parameters):
            reads = re.match(r"(?:SEARCH|SCAN|BLOOM FILTER ON) (\w+)", line)
            if reads is None or reads[1] not in tables.metadata.tables:
                continue
            named = set(re.findall(r"(\w+)[=<>]\?", line)) - {"project_id"}
            if not named or line.startswith("BLOOM") or "AUTOMATIC" in line:
                whole[operation, reads[1]] = line
    return whole


@pytest.fixture(params=["new", "made before it had statistics"])
def store(request: pytest.FixtureRequest, sqlite_url: str, execute_sqlite: Execute) -> Iterator[Store]:
    theirs = open_store(sqlite_url, project="theirs")
    fill(theirs, "zebra", MARK)
    theirs.close()
    if request.param != "new":
        execute_sqlite("DROP TABLE sqlite_stat1")
        open_store(sqlite_url, create=False, project="theirs").close()
        assert not execute_sqlite("SELECT 1 FROM sqlite_master WHERE name = 'sqlite_stat1'"), "a command only reads"
    opened = open_store(sqlite_url, project="mine")
    yield opened
    opened.close()


@pytest.fixture
def execute_sqlite(sqlite_url: str) -> Execute:
    def run(statement: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))) as raw, raw:
            return raw.execute(statement).fetchall()

    return run


def test_no_statement_on_sqlite_reads_a_whole_project_to_find_a_row(store: Store, execute_sqlite: Execute):
    statistics = execute_sqlite("SELECT * FROM sqlite_stat1 ORDER BY idx")
    assert ("calls", "calls_trajectory", "1000000 100000 10 10") in statistics
    found: Statements = {}
    with statements_of("fill", found):
        fill(store, "own", "mine")
    for name, operation in (READS | WRITES).items():
        with statements_of(name, found):
            operation(store)
    assert len(found) > 150
    with store._database.read() as connection:
        whole = whole_reads(connection, found)
    assert {key: line for key, line in whole.items() if key not in READ_WHOLE and key[1] not in SMALL} == {}
    assert len(whole) > 20, "or the plans are worded in another way"
    assert execute_sqlite("SELECT * FROM sqlite_stat1 ORDER BY idx") == statistics, "after a vacuum, too"


BODY = f"decode('{squeeze(b'{}').hex()}', 'hex')"
MANY = (
    "INSERT INTO trajectories (id, origin, started_at, last_call_at, tags, metadata, group_id, project_id, agent_id) "
    "SELECT 't' || n, 'single', n, n, '[]', '{}', 'g' || n / 8, 1, 1 FROM generate_series(1, 3000) AS n",
    "INSERT INTO groups (id, scenario_key, how, held_out, created_at, state, project_id, agent_id) "
    "SELECT 'g' || n, 'task' || n, 'same_task', false, n, 'formed', 1, 1 FROM generate_series(0, 375) AS n",
    "INSERT INTO calls (id, trajectory_id, started_at, duration_ms, requested_model, prompt, params, prompt_tokens, "
    "completion_tokens, status, project_id, agent_id) SELECT 'c' || n, 't' || n / 10, n, 1, 'm', "
    "decode(md5(n::text), 'hex'), '{}', 1, 1, 'ok', 1, 1 FROM generate_series(10, 30000) AS n",
    "INSERT INTO choices (call_id, index, answer, logprobs, project_id, agent_id) SELECT 'c' || n, 0, "
    "decode(md5('a' || n), 'hex'), decode(repeat('ab', 800), 'hex'), 1, 1 FROM generate_series(10, 30000) AS n",
    "INSERT INTO nodes (id, parent, body, project_id) SELECT decode(md5(n::text), 'hex'), "
    f"CASE WHEN n % 10 = 0 THEN '' ELSE decode(md5((n - 1)::text), 'hex') END, {BODY}, 1 "
    "FROM generate_series(10, 30000) AS n",
    "INSERT INTO nodes (id, parent, body, project_id) SELECT decode(md5('a' || n), 'hex'), "
    f"decode(md5(n::text), 'hex'), {BODY}, 1 FROM generate_series(10, 30000) AS n",
    "INSERT INTO scores (id, trajectory_id, name, value, source, at, project_id, agent_id) "
    "SELECT 's' || n, 't' || n, 'reward', 1, 'user', n, 1, 1 FROM generate_series(1, 3000) AS n",
    "ANALYZE",
)
"""30,000 calls of 3,000 runs, as SQL, because writing them takes a minute."""

OF_A_RUN = {
    "trajectories": lambda s: s.read.trajectories(["t2999"]),
    "groups_of": lambda s: s.read.groups_of(["g370"]),
    "summaries": lambda s: s.browse.summaries(["t2999"]),
    "corrections": lambda s: s.evidence.corrections(["t2999"]),
    "ungrouped": lambda s: s.read.ungrouped(settled_before=9.0),
    "erase dry": lambda s: s.rights.erase(trajectory="t2999", dry_run=True),
    "erase": lambda s: s.rights.erase(trajectory="t2999"),
}


def test_postgresql_finds_a_run_among_many_without_reading_them_all(postgres_url: str, server, database: str):
    open_store(postgres_url, project="mine").close()
    for statement in MANY:
        server.execute(statement, database)
    store, found = open_store(postgres_url, project="mine"), Statements()
    for name, operation in OF_A_RUN.items():
        with statements_of(name, found):
            operation(store)
    with store._database.read() as connection:
        plans = {statement: "\n".join(plan(connection, statement, its[1])) for statement, its in found.items()}
    whole = r"Seq Scan on (calls|choices|nodes|trajectories|scores)|calls_started.*\n +Index Cond: \(project_id = 1\)$"
    many = re.compile(whole, re.MULTILINE)
    # No index has the tools of calls: they are read once for all tools that an erasure leaves.
    assert {key: how for key, how in plans.items() if many.search(how) and "calls.tools" not in key} == {}
    assert len(plans) > 30
    store.close()
