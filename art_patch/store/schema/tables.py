"""The tables, as SQLAlchemy Core metadata: the only list of their columns. The documentation says what each is for.

A new store is made from this metadata. A store of an earlier release is migrated (`migrations/`), and a test checks
that both have the same tables. A column is NOT NULL unless it says `null`. Times are seconds since the epoch. Ids are
text of any length, because apps choose some of them and PostgreSQL would refuse an id that is longer than its column
allows.

Every row names the project and the agent that it belongs to. Rows of shared content (messages, token blocks, tools)
name only the project. The project is part of every key, so two projects can use the same names, ids and content hashes.
`backends/scoping.py` limits every statement on these tables to one project; those of `whole` show all projects.
"""

from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy import JSON, Column, Float, Index, Integer, LargeBinary, Table, Text
from sqlalchemy.dialects.postgresql import TSVECTOR

# Newest migration. A store at another revision is migrated, or refused if the revision is unknown. Revisions that begin
# with the same two digits only add to the schema, so apps of this release may write to a store of a later one.
HEAD = "0006"

# The columns that say whose row it is. `Database.write` hands their values to each insert.
SCOPE = ("project_id", "agent_id")

metadata = sa.MetaData()

# The options of a column that is no plain NOT NULL one.
_key, _null, _default = (
    partial(Column, primary_key=True),
    partial(Column, nullable=True),
    partial(Column, nullable=False),
)

_Hash = LargeBinary(16)
# Numbers that providers or apps choose. SQLite's integers have 64 bits anyway.
_Count = Integer().with_variant(sa.BigInteger, "postgresql")


def columns_of(table: Table, record: Any) -> list[Column[Any]]:
    """Return the columns of a table that are named like a field of the class `record`, in the order of the fields."""
    return [table.c[name] for name in record.__slots__ if name in table.c]


def _from_connection(name: str) -> Any:
    def default(context: Any) -> int:
        # A connection without this option does not come from `Database.write`. Its insert fails with a KeyError here,
        # so no row is written that belongs to nobody.
        return context.connection.get_execution_options()[name]

    return default


def _table(name: str, /, *indexes: Index, shared: bool = False, of_agent: bool = False, **columns: Any) -> Table:
    """Return a table whose rows belong to a project and, unless its agents have them in `shared` use, to an agent.

    With `of_agent` the agent is part of the key: two agents of a project have a row each. A column is given by its type
    or, if it has options, as a `Column` without a name.
    """
    named = [_named(column, kind) for column, kind in columns.items()]
    # The project comes last in a key: an id is nearly unique by itself, so it has to lead the index. SQLite keeps the
    # integers 0 and 1 in the header of a row, so both columns together cost two bytes in a store of one project.
    scope = [_scope("project_id", True)] + ([] if shared else [_scope("agent_id", of_agent)])
    return Table(name, metadata, *named, *scope, *indexes)


def _named(name: str, kind: Any) -> Column[Any]:
    column = kind if isinstance(kind, Column) else Column(kind, nullable=False)
    column.name = column.key = name
    return column


def _scope(name: str, in_key: bool) -> Column[int]:
    default = _from_connection(name)
    return Column(name, Integer, primary_key=in_key, autoincrement=False, nullable=False, default=default)


def _index(name: str, *columns: str, where: str | None = None) -> Index:
    """Return an index of each project's rows; with `where`, a partial one."""
    condition = None if where is None else sa.text(where)  # SQLAlchemy has an option of its own for each database
    return Index(name, "project_id", *columns, sqlite_where=condition, postgresql_where=condition)


projects = Table(
    "projects",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("name", Text, unique=True),  # NULL until somebody who may write names the project
)

agents = Table(
    "agents",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("project_id", Integer, primary_key=True, autoincrement=False),
    Column("name", Text),  # NULL until the first policy is kept: it is the NAME of `NAME@STEP`
    sa.UniqueConstraint("project_id", "name", name="agents_name"),
)

nodes = _table(
    "nodes",
    _index("nodes_parent", "parent"),  # the garbage collector asks whether a message has messages below it
    id=_key(_Hash), parent=_Hash, body=LargeBinary, shared=True,
)  # fmt: skip

token_blocks = _table(
    "token_blocks", _index("token_blocks_parent", "parent"), id=_key(_Hash), parent=_Hash, ids=LargeBinary, shared=True
)

blobs = _table("blobs", id=_key(_Hash), body=LargeBinary, shared=True)

trajectories = _table(
    "trajectories",
    # Partial indexes hold only the rows that a query looks for: most trajectories are grouped, and have no user.
    _index("trajectories_ungrouped", "last_call_at", where="group_id IS NULL"),
    _index("trajectories_user", "user_id", where="user_id IS NOT NULL"),
    _index("trajectories_session", "session_id", where="session_id IS NOT NULL"),
    _index("trajectories_recent", "last_call_at"),
    _index("trajectories_group", "group_id", where="group_id IS NOT NULL"),
    id=_key(Text), origin=Text, started_at=Float, ended_at=_null(Float), last_call_at=_null(Float),
    name=_null(Text), scenario_key=_null(Text), group_key=_null(Text), session_id=_null(Text), user_id=_null(Text),
    tags=JSON, metadata=JSON, error=_null(Text),
    group_id=_null(Text),  # set by the job when it forms groups; the app never writes it
    learn=_default(sa.Boolean, server_default=sa.true()),  # once it is false, it stays false
)  # fmt: skip

# Users whose runs, those of before included, are not learned from. A row outlives their runs: they may come back.
withdrawals = _table("withdrawals", user_id=_key(Text), at=Float, who=Text)

spans = _table(
    "spans",
    _index("spans_trajectory", "trajectory_id"),
    id=_key(Text), trajectory_id=Text, parent_id=_null(Text), name=Text, started_at=Float, ended_at=_null(Float),
    kind=_default(Text, server_default="span"), attributes=_default(JSON, server_default="{}"), error=_null(Text),
)  # fmt: skip

calls = _table(
    "calls",
    _index("calls_trajectory", "trajectory_id", "started_at"),
    _index("calls_started", "started_at"),
    _index("calls_prompt", "prompt"),
    _index("calls_prompt_block", "prompt_block", where="prompt_block IS NOT NULL"),
    id=_key(Text), trajectory_id=Text, span_id=_null(Text),
    started_at=Float, duration_ms=Float, ttft_ms=_null(Float),
    requested_model=Text, policy=_null(Text),
    prompt=_Hash,
    tools=_null(_Hash),  # no index: only the garbage collector asks, and it reads all calls
    params=JSON,
    prompt_token_ids=_null(LargeBinary),  # the ids after the last whole block; NULL if no ids are known
    prompt_tokens=_Count, completion_tokens=_Count,
    status=Text, error=_null(Text), fallback=_null(Text), untrainable=_null(Text),
    api=_default(Text, server_default="chat"), shadow_of=_null(Text), prompt_block=_null(_Hash),
    session_id=_null(Text), user_id=_null(Text),  # its trajectory's: online tests count calls by session
    in_control_group=_default(sa.Boolean, server_default=sa.false()), answered_by=_null(Text),
)  # fmt: skip

choices = _table(
    "choices",
    _index("choices_answer", "answer"),
    call_id=_key(Text), index=_key(_Count), answer=_Hash, finish_reason=_null(Text),
    token_ids=_null(LargeBinary), logprobs=_null(LargeBinary),
)  # fmt: skip

# Entries of the search index. FTS5 holds their words on SQLite, this table on PostgreSQL; see `search_index.py`.
search_calls = Table(
    "search_calls",
    metadata,
    Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
    _scope("project_id", True),  # behind the id: the integrity check of SQLite 3.40 takes another order for damage
    Column("call_id", Text, nullable=False),
    Column("words", Text().with_variant(TSVECTOR, "postgresql")),
    Index("search_calls_call", "project_id", "call_id", unique=True),
    Index("search_calls_words", "words", postgresql_using="gin").ddl_if(dialect="postgresql"),
    sqlite_with_rowid=False,  # its rows are small, and found by both keys
)

scenarios = _table("scenarios", key=_key(Text), held_out=sa.Boolean, first_seen_at=Float)

# Of each wording of a task: the scenario that it was first seen in. Hashes alone, so they outlive the runs: a task that
# a policy has learned must not test a later one because its runs were deleted.
wordings = _table("wordings", key=_key(Text), scenario_key=Text, held_out=sa.Boolean, first_seen_at=Float)

# What upstream's models meant: each model that the app asked for, and those that answered, since they first did. No
# more than `upstream_models.py` allows.
upstream_models = _table("upstream_models", requested_model=_key(Text), answered_by=_key(Text), first_seen_at=Float)

groups = _table(
    "groups",
    _index("groups_state", "state", "held_out"),
    _index("groups_scenario", "scenario_key"),  # an erasure asks whether a scenario has groups left
    id=_key(Text), scenario_key=Text, how=Text, held_out=sa.Boolean, created_at=Float,
    state=Text, reason=_null(Text), policy=_null(Text),
)  # fmt: skip

# No foreign keys: rows arrive in any order from many processes, and lineage outlives data. `verify` checks references.
trainings = _table("trainings", _index("trainings_group", "group_id"), policy=_key(Text), group_id=_key(Text))

trained_rows = _table(
    "trained_rows",
    _index("trained_rows_trajectory", "trajectory_id"),
    policy=_key(Text), call_id=_key(Text), choice=_key(_Count),
    trajectory_id=Text, group_id=Text, advantage=Float, weight=Float,
)  # fmt: skip

# What both policies answered to a held-out turn in a gate; `answers` is compressed JSON.
gate_answers = _table(
    "gate_answers",
    _index("gate_answers_trajectory", "trajectory_id"),
    _index("gate_answers_policy", "policy", "against", "group_id"),
    id=_key(Text), policy=Text, against=Text, group_id=Text, call_id=Text, trajectory_id=Text, answers=LargeBinary,
)  # fmt: skip

scores = _table(
    "scores",
    _index("scores_trajectory", "trajectory_id"),
    id=_key(Text), trajectory_id=Text, name=Text, value=Float, source=Text, at=Float,
    comment=_null(Text), group_id=_null(Text), rubric=_null(Text), judge=_null(Text),
    session_id=_null(Text), user_id=_null(Text),  # its trajectory's, as in `calls`
)  # fmt: skip

judgements = _table(
    "judgements",
    _index("judgements_group", "group_id"),
    _index("judgements_at", "at"),
    id=_key(Text), group_id=_null(Text), at=Float,
    judge=Text, rubric=Text, purpose=Text, state=Text, reason=_null(Text),
    calls=_Count, prompt_tokens=_Count, completion_tokens=_Count, cost_usd=_null(Float), facts=JSON,
)  # fmt: skip

corrections = _table(
    "corrections",
    _index("corrections_trajectory", "trajectory_id"),
    id=_key(Text), trajectory_id=Text, call_id=_null(Text),
    at=Float, source=Text, message=JSON, comment=_null(Text),
)  # fmt: skip

policies = _table(
    "policies",
    name=_key(Text), base=Text, base_sha256=Text, state=Text, created_at=Float,
    path=_null(Text), parent=_null(Text), metrics=JSON,
)  # fmt: skip

# Their ids count from 1 in each project. Numbers of the whole store could be used up, or counted, from another project.
promotions = _table(
    "promotions",
    _index("promotions_id", "id"),
    id=_key(Integer), policy=Text, from_state=_null(Text), to_state=Text,
    at=Float, who=Text, reason=Text, metrics=JSON,
)  # fmt: skip

audit = _table(
    "audit",
    _index("audit_id", "id"),
    id=_key(Integer), at=Float, who=Text, action=Text, detail=JSON, previous=Text, hash=Text,
)  # fmt: skip

exports = _table("exports", id=_key(Text), at=Float, who=Text, path=Text, format=Text, trajectories=_Count)

export_members = _table("export_members", trajectory_id=_key(Text), export_id=_key(Text))

sent = _table(
    "sent",
    _index("sent_trajectory", "trajectory_id"),
    target=_key(Text), item=_key(Text), trajectory_id=_null(Text), digest=Text, at=Float,
)  # fmt: skip

apps = _table("apps", id=_key(Text), at=Float, facts=JSON)

control = _table("control", key=_key(Text), value=Text, updated_at=Float, of_agent=True)

leases = _table(
    "leases",
    name=_key(Text),
    token=_Count,  # grows with each owner; a write of an old owner is refused by it
    beat=_Count, owner=_null(Text), host=_null(Text), pid=_null(_Count), boot=_null(Text), started=_null(Text),
    renewed_at=_null(Float), of_agent=True,
)  # fmt: skip


class _Whole:
    """The same tables for statements about all projects of the store, such as `whole.calls`."""

    def __init__(self) -> None:
        self.metadata = sa.MetaData()
        for table in metadata.sorted_tables:
            table.to_metadata(self.metadata)

    def __getattr__(self, name: str) -> Table:
        return self.metadata.tables[name]


whole = _Whole()
