"""The first revision. It makes no tables: a new store is made from `tables.py`, and begins at the newest revision."""

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Do nothing: alembic requires this function, and no store has a revision before the first."""
