"""Adds what says whose runs are not learned from: `trajectories.learn`, and the users in `withdrawals`."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add the column and the table, empty: nobody has said so of an earlier run."""
    op.add_column("trajectories", sa.Column("learn", sa.Boolean(), server_default=sa.true(), nullable=False))
    op.create_table(
        "withdrawals",
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("who", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("agent_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("user_id", "project_id"),
    )
