"""The tables, as SQLAlchemy Core metadata: the only list of their columns. ../README.md says what each is for.

A new store is made from this metadata. A store of an earlier release is migrated (`migrations/`), and a test checks
that both have the same tables. Times are seconds since the epoch. Ids are text of any length, because apps choose some
of them and PostgreSQL would refuse an id that is longer than its column allows.

Every row names the project and the agent that it belongs to. Rows of shared content (messages, token blocks, tools)
name only the project. The project is part of every key, so two projects can use the same names, ids and content hashes.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)

# Newest migration. A store at another revision is migrated, or refused if the revision is unknown.
HEAD = "0001"

# The columns that say whose row it is. `Database.write` hands their values to each insert.
SCOPE = ("project_id", "agent_id")

metadata = MetaData()

# Numbers that providers or apps choose. SQLite's integers have 64 bits anyway.
_Count = Integer().with_variant(BigInteger, "postgresql")


def columns_of(table: Table, record: Any) -> list[Column[Any]]:
    """Return the columns of a table that are named like a field of the class `record`, in the order of the fields."""
    return [table.c[name] for name in record.__slots__ if name in table.c]


def _from_connection(name: str) -> Any:
    def default(context: Any) -> int:
        # A connection without this option does not come from `Database.write`. Its insert fails with a KeyError here,
        # so no row is written that belongs to nobody.
        return context.connection.get_execution_options()[name]

    return default


def _table(name: str, *columns: Column[Any] | Index, shared: bool = False, of_agent: bool = False) -> Table:
    """Return a table whose rows belong to a project and, unless its agents have them in `shared` use, to an agent.

    With `of_agent` the agent is part of the key: two agents of a project have a row each.
    """
    keys = [column for column in columns if isinstance(column, Column) and column.primary_key]
    numbered = any(column.autoincrement is True for column in keys)  # the database's own number is a key by itself
    # The project comes last in a key: an id is nearly unique by itself, so it has to lead the index. SQLite keeps the
    # integers 0 and 1 in the header of a row, so both columns together cost two bytes in a store of one project.
    scope = [_scope("project_id", not numbered)] + ([] if shared else [_scope("agent_id", of_agent)])
    return Table(name, metadata, *columns, *scope)


def _scope(name: str, in_key: bool) -> Column[int]:
    default = _from_connection(name)
    return Column(name, Integer, primary_key=in_key, autoincrement=False, nullable=False, default=default)


def _where(name: str, column: str, condition: str) -> Index:
    """Return a partial index. SQLAlchemy has an option of its own for it for each database."""
    return Index(name, column, sqlite_where=text(condition), postgresql_where=text(condition))


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
    Column("project_id", Integer, nullable=False),
    Column("name", Text),  # NULL until the first policy is kept: it is the NAME of `NAME@STEP`
    UniqueConstraint("project_id", "name", name="agents_name"),
)

nodes = _table(
    "nodes",
    Column("id", LargeBinary(16), primary_key=True),
    Column("parent", LargeBinary(16), nullable=False),
    Column("body", LargeBinary, nullable=False),
    Index("nodes_parent", "parent"),  # the garbage collector asks whether a message has messages below it
    shared=True,
)

token_blocks = _table(
    "token_blocks",
    Column("id", LargeBinary(16), primary_key=True),
    Column("parent", LargeBinary(16), nullable=False),
    Column("ids", LargeBinary, nullable=False),
    Index("token_blocks_parent", "parent"),
    shared=True,
)

blobs = _table(
    "blobs",
    Column("id", LargeBinary(16), primary_key=True),
    Column("body", LargeBinary, nullable=False),
    shared=True,
)

trajectories = _table(
    "trajectories",
    Column("id", Text, primary_key=True),
    Column("origin", Text, nullable=False),
    Column("started_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("last_call_at", Float),
    Column("name", Text),
    Column("scenario_key", Text),
    Column("group_key", Text),
    Column("session_id", Text),
    Column("user_id", Text),
    Column("tags", JSON, nullable=False),
    Column("metadata", JSON, nullable=False),
    Column("error", Text),
    Column("group_id", Text),  # set by the job when it forms groups; the app never writes it
    # Partial indexes hold only the rows that a query looks for: most trajectories are grouped, and have no user.
    _where("trajectories_ungrouped", "last_call_at", "group_id IS NULL"),
    _where("trajectories_user", "user_id", "user_id IS NOT NULL"),
    _where("trajectories_session", "session_id", "session_id IS NOT NULL"),
    Index("trajectories_recent", "last_call_at"),
    Index("trajectories_group", "group_id"),
)

spans = _table(
    "spans",
    Column("id", Text, primary_key=True),
    Column("trajectory_id", Text, nullable=False),
    Column("parent_id", Text),
    Column("name", Text, nullable=False),
    Column("started_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("kind", Text, nullable=False, server_default="span"),
    Column("attributes", JSON, nullable=False, server_default="{}"),
    Column("error", Text),
    Index("spans_trajectory", "trajectory_id"),
)

calls = _table(
    "calls",
    Column("id", Text, primary_key=True),
    Column("trajectory_id", Text, nullable=False),
    Column("span_id", Text),
    Column("started_at", Float, nullable=False),
    Column("duration_ms", Float, nullable=False),
    Column("ttft_ms", Float),
    Column("requested_model", Text, nullable=False),
    Column("policy", Text),
    Column("prompt", LargeBinary(16), nullable=False),
    Column("tools", LargeBinary(16)),  # no index: only the garbage collector asks, and it reads all calls
    Column("params", JSON, nullable=False),
    Column("prompt_token_ids", LargeBinary),  # the ids after the last whole block; NULL if no ids are known
    Column("prompt_tokens", _Count, nullable=False),
    Column("completion_tokens", _Count, nullable=False),
    Column("status", Text, nullable=False),
    Column("error", Text),
    Column("fallback", Text),
    Column("untrainable", Text),
    Column("api", Text, nullable=False, server_default="chat"),
    Column("shadow_of", Text),
    Column("prompt_block", LargeBinary(16)),
    Column("session_id", Text),  # of its trajectory, and the user too: online tests count calls by session
    Column("user_id", Text),
    Index("calls_trajectory", "trajectory_id", "started_at"),
    Index("calls_started", "started_at"),
    Index("calls_prompt", "prompt"),
    _where("calls_prompt_block", "prompt_block", "prompt_block IS NOT NULL"),
)

choices = _table(
    "choices",
    Column("call_id", Text, primary_key=True),
    Column("index", _Count, primary_key=True),
    Column("answer", LargeBinary(16), nullable=False),
    Column("finish_reason", Text),
    Column("token_ids", LargeBinary),
    Column("logprobs", LargeBinary),
    Index("choices_answer", "answer"),
)

scenarios = _table(
    "scenarios",
    Column("key", Text, primary_key=True),
    Column("held_out", Boolean, nullable=False),
    Column("first_seen_at", Float, nullable=False),
)

groups = _table(
    "groups",
    Column("id", Text, primary_key=True),
    Column("scenario_key", Text, nullable=False),
    Column("how", Text, nullable=False),
    Column("held_out", Boolean, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("state", Text, nullable=False),
    Column("reason", Text),
    Column("policy", Text),
    Column("claimed_by", Text),  # a worker, until `claimed_until` (seconds since the epoch)
    Column("claimed_until", Float),
    Index("groups_state", "state", "held_out"),
)

# No foreign keys: rows arrive in any order from many processes, and lineage outlives data. `verify` checks references.
trainings = _table(
    "trainings",
    Column("policy", Text, primary_key=True),
    Column("group_id", Text, primary_key=True),
    Index("trainings_group", "group_id"),
)

trained_rows = _table(
    "trained_rows",
    Column("policy", Text, primary_key=True),
    Column("call_id", Text, primary_key=True),
    Column("choice", _Count, primary_key=True),
    Column("trajectory_id", Text, nullable=False),
    Column("group_id", Text, nullable=False),
    Column("advantage", Float, nullable=False),
    Column("weight", Float, nullable=False),
    Index("trained_rows_trajectory", "trajectory_id"),
)

scores = _table(
    "scores",
    Column("id", Text, primary_key=True),
    Column("trajectory_id", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("value", Float, nullable=False),
    Column("source", Text, nullable=False),
    Column("at", Float, nullable=False),
    Column("comment", Text),
    Column("group_id", Text),
    Column("rubric", Text),
    Column("judge", Text),
    Column("session_id", Text),  # of its trajectory, as in `calls`
    Column("user_id", Text),
    Index("scores_trajectory", "trajectory_id"),
)

judgements = _table(
    "judgements",
    Column("id", Text, primary_key=True),
    Column("group_id", Text),
    Column("at", Float, nullable=False),
    Column("judge", Text, nullable=False),
    Column("rubric", Text, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("reason", Text),
    Column("calls", _Count, nullable=False),
    Column("prompt_tokens", _Count, nullable=False),
    Column("completion_tokens", _Count, nullable=False),
    Column("cost_usd", Float),
    Column("facts", JSON, nullable=False),
    Index("judgements_group", "group_id"),
    Index("judgements_at", "at"),
)

corrections = _table(
    "corrections",
    Column("id", Text, primary_key=True),
    Column("trajectory_id", Text, nullable=False),
    Column("call_id", Text),
    Column("at", Float, nullable=False),
    Column("source", Text, nullable=False),
    Column("message", JSON, nullable=False),
    Column("comment", Text),
    Index("corrections_trajectory", "trajectory_id"),
)

policies = _table(
    "policies",
    Column("name", Text, primary_key=True),
    Column("base", Text, nullable=False),
    Column("base_sha256", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("path", Text),
    Column("parent", Text),
    Column("metrics", JSON, nullable=False),
)

promotions = _table(
    "promotions",
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("policy", Text, nullable=False),
    Column("from_state", Text),
    Column("to_state", Text, nullable=False),
    Column("at", Float, nullable=False),
    Column("who", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("metrics", JSON, nullable=False),
)

audit = _table(
    "audit",
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("at", Float, nullable=False),
    Column("who", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("detail", JSON, nullable=False),
    Column("previous", Text, nullable=False),
    Column("hash", Text, nullable=False),
)

exports = _table(
    "exports",
    Column("id", Text, primary_key=True),
    Column("at", Float, nullable=False),
    Column("who", Text, nullable=False),
    Column("path", Text, nullable=False),
    Column("format", Text, nullable=False),
    Column("trajectories", _Count, nullable=False),
)

export_members = _table(
    "export_members",
    Column("trajectory_id", Text, primary_key=True),
    Column("export_id", Text, primary_key=True),
)

sent = _table(
    "sent",
    Column("target", Text, primary_key=True),
    Column("item", Text, primary_key=True),
    Column("trajectory_id", Text),
    Column("digest", Text, nullable=False),
    Column("at", Float, nullable=False),
    Index("sent_trajectory", "trajectory_id"),
)

apps = _table(
    "apps",
    Column("id", Text, primary_key=True),
    Column("at", Float, nullable=False),
    Column("facts", JSON, nullable=False),
)

control = _table(
    "control",
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),
    Column("updated_at", Float, nullable=False),
    of_agent=True,
)

leases = _table(
    "leases",
    Column("name", Text, primary_key=True),
    Column("token", _Count, nullable=False),  # grows with each owner; a write of an old owner is refused by it
    Column("beat", _Count, nullable=False),
    Column("owner", Text),
    Column("host", Text),
    Column("pid", _Count),
    Column("boot", Text),
    Column("started", Text),
    Column("renewed_at", Float),
    of_agent=True,
)
