"""Adds the table `wordings`, which keeps each wording of a task in the scenario that it was first seen in."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the table, empty: each cycle adds the wordings that it sees."""
    op.create_table(
        "wordings",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("scenario_key", sa.Text(), nullable=False),
        sa.Column("held_out", sa.Boolean(), nullable=False),
        sa.Column("first_seen_at", sa.Float(), nullable=False),
        sa.Column("project_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("agent_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("key", "project_id"),
    )
