"""The tables, as SQLAlchemy Core metadata. README.md beside this file says what each is for.

Migrations create them (`migrations/versions`); a test compares both. Times are seconds since the epoch, ids text.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    text,
)

HEAD = "0002"
"""Newest migration. A store at another revision is migrated, or refused if the revision is unknown."""

metadata = MetaData()

nodes = Table(
    "nodes",
    metadata,
    Column("id", LargeBinary(16), primary_key=True),
    Column("parent", LargeBinary(16), nullable=False),
    Column("body", LargeBinary, nullable=False),
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
    Column("id", String(64), primary_key=True),
    Column("origin", String(16), nullable=False),
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
    Column("group_id", String(32)),
    Index("trajectories_ungrouped", "last_call_at", sqlite_where=text("group_id IS NULL")),
    Index("trajectories_group", "group_id"),
)

spans = Table(
    "spans",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("trajectory_id", String(64), nullable=False),
    Column("parent_id", String(32)),
    Column("name", Text, nullable=False),
    Column("started_at", Float, nullable=False),
    Column("ended_at", Float),
    Index("spans_trajectory", "trajectory_id"),
)

calls = Table(
    "calls",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("trajectory_id", String(64), nullable=False),
    Column("span_id", String(32)),
    Column("started_at", Float, nullable=False),
    Column("duration_ms", Float, nullable=False),
    Column("ttft_ms", Float),
    Column("requested_model", Text, nullable=False),
    Column("policy", Text),
    Column("prompt", LargeBinary(16), nullable=False),
    Column("tools", LargeBinary(16)),
    Column("params", JSON, nullable=False),
    Column("prompt_token_ids", LargeBinary),
    Column("prompt_tokens", Integer, nullable=False),
    Column("completion_tokens", Integer, nullable=False),
    Column("status", String(16), nullable=False),
    Column("error", Text),
    Column("fallback", Text),
    Column("untrainable", Text),
    Column("api", String(16), nullable=False, server_default="chat"),
    Column("shadow_of", String(32)),
    Index("calls_trajectory", "trajectory_id", "started_at"),
    Index("calls_started", "started_at"),
)

choices = Table(
    "choices",
    metadata,
    Column("call_id", String(32), primary_key=True),
    Column("index", Integer, primary_key=True),
    Column("answer", LargeBinary(16), nullable=False),
    Column("finish_reason", Text),
    Column("token_ids", LargeBinary),
    Column("logprobs", LargeBinary),
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
    Column("id", String(32), primary_key=True),
    Column("scenario_key", Text, nullable=False),
    Column("how", String(16), nullable=False),
    Column("held_out", Boolean, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("state", String(16), nullable=False),
    Column("reason", Text),
    Column("policy", Text),
    Index("groups_state", "state", "held_out"),
)

scores = Table(
    "scores",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("trajectory_id", String(64), nullable=False),
    Column("name", Text, nullable=False),
    Column("value", Float, nullable=False),
    Column("source", String(16), nullable=False),
    Column("at", Float, nullable=False),
    Column("comment", Text),
    Column("group_id", String(32)),
    Column("rubric", Text),
    Column("judge", Text),
    Index("scores_trajectory", "trajectory_id"),
)

policies = Table(
    "policies",
    metadata,
    Column("name", Text, primary_key=True),
    Column("base", Text, nullable=False),
    Column("base_sha256", String(64), nullable=False),
    Column("state", String(16), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("path", Text),
    Column("parent", Text),
    Column("figures", JSON, nullable=False),
)

promotions = Table(
    "promotions",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("policy", Text, nullable=False),
    Column("from_state", String(16)),
    Column("to_state", String(16), nullable=False),
    Column("at", Float, nullable=False),
    Column("who", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("figures", JSON, nullable=False),
)

audit = Table(
    "audit",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("at", Float, nullable=False),
    Column("who", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("detail", JSON, nullable=False),
    Column("previous", String(64), nullable=False),
    Column("hash", String(64), nullable=False),
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
    Column("key", String(32), primary_key=True),
    Column("value", Text, nullable=False),
    Column("updated_at", Float, nullable=False),
)
