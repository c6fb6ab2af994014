"""Calls of every surface, calls that the app never saw, and what apps report. Additive: an older writer goes on."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add two columns to `calls`, and the table `apps`."""
    op.add_column("calls", sa.Column("api", sa.Text(), nullable=False, server_default="chat"))
    op.add_column("calls", sa.Column("shadow_of", sa.Text(), nullable=True))
    op.create_table(
        "apps",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
