"""What agent frameworks tell of a span: its kind, what went in and came out, how it failed. Additive."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add columns; a writer of before leaves them as they are."""
    op.add_column("spans", sa.Column("kind", sa.Text(), nullable=False, server_default="span"))
    op.add_column("spans", sa.Column("attributes", sa.JSON(), nullable=False, server_default="{}"))
    op.add_column("spans", sa.Column("error", sa.Text(), nullable=True))
