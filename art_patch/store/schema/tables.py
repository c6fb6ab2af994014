"""The tables, as SQLAlchemy Core metadata. README.md beside this file says what each is for.

A new store is made from them, an older one is migrated (`migrations/versions`); a test compares both. Times are seconds
since the epoch, ids text of any length, because apps bring their own and PostgreSQL would refuse those that are longer
than a column says.
"""

from __future__ import annotations

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
    text,
)

HEAD = "0007"
"""Newest migration. A store at another revision is migrated, or refused if the revision is unknown."""

metadata = MetaData()


_Count = Integer().with_variant(BigInteger, "postgresql")
"""Numbers that others choose; SQLite's integers have 64 bits by themselves."""


def _where(name: str, column: str, condition: str) -> Index:
    """An index of some rows only; both databases know it, each by a name of its own."""
    return Index(name, column, sqlite_where=text(condition), postgresql_where=text(condition))


nodes = Table(
    "nodes",
    metadata,
    Column("id", LargeBinary(16), primary_key=True),
    Column("parent", LargeBinary(16), nullable=False),
    Column("body", LargeBinary, nullable=False),
    Index("nodes_parent", "parent"),
)

token_blocks = Table(
    "token_blocks",
    metadata,
    Column("id", LargeBinary(16), primary_key=True),
    Column("parent", LargeBinary(16), nullable=False),
    Column("ids", LargeBinary, nullable=False),
    Index("token_blocks_parent", "parent"),
)

blobs = Table(
    "blobs",
    metadata,
    Column("id", LargeBinary(16), primary_key=True),
    Column("body", LargeBinary, nullable=False),
)

trajectories = Table(
    "trajectories",
    metadata,
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
    Column("group_id", Text),
    _where("trajectories_ungrouped", "last_call_at", "group_id IS NULL"),
    _where("trajectories_user", "user_id", "user_id IS NOT NULL"),
    _where("trajectories_session", "session_id", "session_id IS NOT NULL"),
    Index("trajectories_recent", "last_call_at"),
    Index("trajectories_group", "group_id"),
)

spans = Table(
    "spans",
    metadata,
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

calls = Table(
    "calls",
    metadata,
    Column("id", Text, primary_key=True),
    Column("trajectory_id", Text, nullable=False),
    Column("span_id", Text),
    Column("started_at", Float, nullable=False),
    Column("duration_ms", Float, nullable=False),
    Column("ttft_ms", Float),
    Column("requested_model", Text, nullable=False),
    Column("policy", Text),
    Column("prompt", LargeBinary(16), nullable=False),
    Column("tools", LargeBinary(16)),
    Column("params", JSON, nullable=False),
    Column("prompt_token_ids", LargeBinary),
    Column("prompt_tokens", _Count, nullable=False),
    Column("completion_tokens", _Count, nullable=False),
    Column("status", Text, nullable=False),
    Column("error", Text),
    Column("fallback", Text),
    Column("untrainable", Text),
    Column("api", Text, nullable=False, server_default="chat"),
    Column("shadow_of", Text),
    Column("prompt_block", LargeBinary(16)),
    Index("calls_trajectory", "trajectory_id", "started_at"),
    Index("calls_started", "started_at"),
    Index("calls_prompt", "prompt"),
    _where("calls_prompt_block", "prompt_block", "prompt_block IS NOT NULL"),
)

choices = Table(
    "choices",
    metadata,
    Column("call_id", Text, primary_key=True),
    Column("index", _Count, primary_key=True),
    Column("answer", LargeBinary(16), nullable=False),
    Column("finish_reason", Text),
    Column("token_ids", LargeBinary),
    Column("logprobs", LargeBinary),
    Index("choices_answer", "answer"),
)

scenarios = Table(
    "scenarios",
    metadata,
    Column("key", Text, primary_key=True),
    Column("held_out", Boolean, nullable=False),
    Column("first_seen_at", Float, nullable=False),
)

groups = Table(
    "groups",
    metadata,
    Column("id", Text, primary_key=True),
    Column("scenario_key", Text, nullable=False),
    Column("how", Text, nullable=False),
    Column("held_out", Boolean, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("state", Text, nullable=False),
    Column("reason", Text),
    Column("policy", Text),
    Column("claimed_by", Text),
    Column("claimed_until", Float),
    Index("groups_state", "state", "held_out"),
)

trainings = Table(
    "trainings",
    metadata,
    Column("policy", Text, primary_key=True),
    Column("group_id", Text, primary_key=True),
    Index("trainings_group", "group_id"),
)

scores = Table(
    "scores",
    metadata,
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
    Index("scores_trajectory", "trajectory_id"),
)

judgements = Table(
    "judgements",
    metadata,
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

corrections = Table(
    "corrections",
    metadata,
    Column("id", Text, primary_key=True),
    Column("trajectory_id", Text, nullable=False),
    Column("call_id", Text),
    Column("at", Float, nullable=False),
    Column("source", Text, nullable=False),
    Column("message", JSON, nullable=False),
    Column("comment", Text),
    Index("corrections_trajectory", "trajectory_id"),
)

policies = Table(
    "policies",
    metadata,
    Column("name", Text, primary_key=True),
    Column("base", Text, nullable=False),
    Column("base_sha256", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("path", Text),
    Column("parent", Text),
    Column("metrics", JSON, nullable=False),
)

promotions = Table(
    "promotions",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("policy", Text, nullable=False),
    Column("from_state", Text),
    Column("to_state", Text, nullable=False),
    Column("at", Float, nullable=False),
    Column("who", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("metrics", JSON, nullable=False),
)

audit = Table(
    "audit",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("at", Float, nullable=False),
    Column("who", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("detail", JSON, nullable=False),
    Column("previous", Text, nullable=False),
    Column("hash", Text, nullable=False),
)

exports = Table(
    "exports",
    metadata,
    Column("id", Text, primary_key=True),
    Column("at", Float, nullable=False),
    Column("who", Text, nullable=False),
    Column("path", Text, nullable=False),
    Column("format", Text, nullable=False),
    Column("trajectories", _Count, nullable=False),
)

export_members = Table(
    "export_members",
    metadata,
    Column("trajectory_id", Text, primary_key=True),
    Column("export_id", Text, primary_key=True),
)

sent = Table(
    "sent",
    metadata,
    Column("target", Text, primary_key=True),
    Column("item", Text, primary_key=True),
    Column("trajectory_id", Text),
    Column("digest", Text, nullable=False),
    Column("at", Float, nullable=False),
    Index("sent_trajectory", "trajectory_id"),
)

apps = Table(
    "apps",
    metadata,
    Column("id", Text, primary_key=True),
    Column("at", Float, nullable=False),
    Column("facts", JSON, nullable=False),
)

control = Table(
    "control",
    metadata,
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),
    Column("updated_at", Float, nullable=False),
)

leases = Table(
    "leases",
    metadata,
    Column("name", Text, primary_key=True),
    Column("token", _Count, nullable=False),
    Column("beat", _Count, nullable=False),
    Column("owner", Text),
    Column("host", Text),
    Column("pid", _Count),
    Column("boot", Text),
    Column("started", Text),
    Column("renewed_at", Float),
)
