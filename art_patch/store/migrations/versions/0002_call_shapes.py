"""Calls of every surface, and calls that the app never saw. Additive: an older writer goes on, its calls are chat."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add two columns to `calls`."""
    op.add_column("calls", sa.Column("api", sa.String(length=16), nullable=False, server_default="chat"))
    op.add_column("calls", sa.Column("shadow_of", sa.String(length=32), nullable=True))
