"""What most commands begin with: settings put together, and the store that they name."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from art_patch.garbage import uncollected

if TYPE_CHECKING:
    from art_patch.settings import Settings
    from art_patch.store import Store


@contextmanager
def opened_store(**given: Any) -> Generator[tuple[Settings, Store]]:
    """Open the project's store, which must exist, for the block.

    Args:
        given: as `load_settings` takes it.

    Raises:
        ConfigError: a setting says something impossible.
        StoreError: there is no such store, or it cannot be opened.
        StoreTooNew: a newer release wrote it.
    """
    with uncollected():  # what is imported stays; to look through it meanwhile costs a command forty milliseconds
        from art_patch.settings import load_settings
        from art_patch.store import open_store

        settings = load_settings(**given)
        store = open_store(settings.store_url, create=False)
    try:
        yield settings, store
    finally:
        store.close()
