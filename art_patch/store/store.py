"""An open store, and opening one. Imports SQLAlchemy."""

from __future__ import annotations

from art_patch.store.connect import Database, Trouble
from art_patch.store.ledger import Ledger
from art_patch.store.read import Reader
from art_patch.store.verify import verify
from art_patch.store.write import Writer


class Store:
    """An open store. Methods are grouped by who uses them: `write`, `read.*`, `ledger.*`."""

    def __init__(self, database: Database) -> None:
        """Wrap an open database."""
        self._database = database
        self._writer = Writer(database)
        self.write = self._writer.write
        self.read = Reader(database)
        self.ledger = Ledger(database)

    def verify(self) -> list[str]:
        """Return every inconsistency found, in words; empty means sound."""
        return verify(self._database)

    def close(self) -> None:
        """Close all connections."""
        self._database.close()


def open_store(url: str, *, create: bool = True, trouble: Trouble | None = None) -> Store:
    """Open (and migrate) the store at `url`.

    Args:
        url: `sqlite:////absolute/path/store.db`.
        create: make it if it does not exist.
        trouble: the app's recorder: told when the file was deleted or replaced while open, or was corrupt and set
            aside. Without it a corrupt file stays where it is.

    Raises:
        StoreError: if it cannot be opened, is not a store, or is missing and `create` is false.
        StoreTooNew: if a newer release wrote it.
    """
    return Store(Database(url, create=create, trouble=trouble))
