"""Adds the table `gate_answers`, which keeps both policies' answers to the held-out turns of a gate."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add the table, empty: earlier gates kept scores alone."""
    op.create_table(
        "gate_answers",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("against", sa.Text(), nullable=False),
        sa.Column("group_id", sa.Text(), nullable=False),
        sa.Column("call_id", sa.Text(), nullable=False),
        sa.Column("trajectory_id", sa.Text(), nullable=False),
        sa.Column("answers", sa.LargeBinary(), nullable=False),
        sa.Column("project_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("agent_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("id", "project_id"),
    )
    op.create_index("gate_answers_trajectory", "gate_answers", ["project_id", "trajectory_id"])
    op.create_index("gate_answers_policy", "gate_answers", ["project_id", "policy", "against", "group_id"])
