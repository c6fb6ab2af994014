"""Adds what a comparison with upstream needs: who is in the control group, and which model answered.

`calls.in_control_group` says whether upstream answered because the session is kept there for comparison,
`calls.answered_by` which model its answer names; the table `upstream_models` keeps when each was first seen.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add both columns and the table, empty: no earlier call was in a control group or says which model answered."""
    op.add_column("calls", sa.Column("in_control_group", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.add_column("calls", sa.Column("answered_by", sa.Text(), nullable=True))
    op.create_table(
        "upstream_models",
        sa.Column("requested_model", sa.Text(), nullable=False),
        sa.Column("answered_by", sa.Text(), nullable=False),
        sa.Column("first_seen_at", sa.Float(), nullable=False),
        sa.Column("project_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("agent_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("requested_model", "answered_by", "project_id"),
    )
