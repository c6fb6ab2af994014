"""Shared prompt ids, claims, what was trained on and exported, and the indexes that deleting needs. Additive."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add tables, columns and indexes."""
    op.create_table(
        "token_blocks",
        sa.Column("id", sa.LargeBinary(length=16), nullable=False),
        sa.Column("parent", sa.LargeBinary(length=16), nullable=False),
        sa.Column("ids", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "trainings",
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("group_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("policy", "group_id"),
    )
    op.create_table(
        "exports",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("who", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("format", sa.Text(), nullable=False),
        sa.Column("trajectories", sa.Integer().with_variant(sa.BigInteger(), "postgresql"), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "export_members",
        sa.Column("trajectory_id", sa.Text(), nullable=False),
        sa.Column("export_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("trajectory_id", "export_id"),
    )
    op.add_column("calls", sa.Column("prompt_block", sa.LargeBinary(length=16), nullable=True))
    op.add_column("groups", sa.Column("claimed_by", sa.Text(), nullable=True))
    op.add_column("groups", sa.Column("claimed_until", sa.Float(), nullable=True))
    # What a policy was trained on before there was a table for it.
    op.execute("INSERT INTO trainings (policy, group_id) SELECT policy, id FROM groups WHERE policy IS NOT NULL")
    op.create_index("nodes_parent", "nodes", ["parent"])
    op.create_index("token_blocks_parent", "token_blocks", ["parent"])
    op.create_index("calls_prompt", "calls", ["prompt"])
    _create_partial_index("calls_prompt_block", "calls", "prompt_block", "prompt_block IS NOT NULL")
    op.create_index("choices_answer", "choices", ["answer"])
    op.create_index("trainings_group", "trainings", ["group_id"])
    op.create_index("trajectories_recent", "trajectories", ["last_call_at"])
    _create_partial_index("trajectories_user", "trajectories", "user_id", "user_id IS NOT NULL")
    _create_partial_index("trajectories_session", "trajectories", "session_id", "session_id IS NOT NULL")


def _create_partial_index(name: str, table: str, column: str, condition: str) -> None:
    op.create_index(name, table, [column], sqlite_where=sa.text(condition), postgresql_where=sa.text(condition))
