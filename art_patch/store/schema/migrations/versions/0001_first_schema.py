"""The first schema. It makes nothing: a new store is made from `tables.py`, at whatever revision that is by then."""

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Do nothing: alembic asks for it, and no store is at a revision before the first."""
