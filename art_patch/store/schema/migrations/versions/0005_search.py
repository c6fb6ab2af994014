"""Adds the table `search_calls`, the entries of the search index."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import TSVECTOR

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add the table, empty: server and job index the calls that are there."""
    op.create_table(
        "search_calls",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("project_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("call_id", sa.Text(), nullable=False),
        sa.Column("words", sa.Text().with_variant(TSVECTOR, "postgresql"), nullable=True),
        sa.PrimaryKeyConstraint("id", "project_id"),
        sqlite_with_rowid=False,
    )
    op.create_index("search_calls_call", "search_calls", ["project_id", "call_id"], unique=True)
    if op.get_bind().dialect.name == "postgresql":
        op.create_index("search_calls_words", "search_calls", ["words"], postgresql_using="gin")
