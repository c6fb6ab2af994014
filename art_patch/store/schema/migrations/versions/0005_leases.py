"""Who alone may run a cycle. Additive."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add a table."""
    count = sa.Integer().with_variant(sa.BigInteger(), "postgresql")
    op.create_table(
        "leases",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("token", count, nullable=False),
        sa.Column("beat", count, nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("host", sa.Text(), nullable=True),
        sa.Column("pid", count, nullable=True),
        sa.Column("boot", sa.Text(), nullable=True),
        sa.Column("started", sa.Text(), nullable=True),
        sa.Column("renewed_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("name"),
    )
