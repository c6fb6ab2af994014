"""Adds `calls.in_control_group`: whether upstream answered because the session is kept there for comparison."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the column: no earlier call was in a control group."""
    op.add_column("calls", sa.Column("in_control_group", sa.Boolean(), server_default=sa.false(), nullable=False))
