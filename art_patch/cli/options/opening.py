"""What most commands begin with: settings put together, and the store that they name."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from art_patch._lib.gc_pause import uncollected

if TYPE_CHECKING:
    from pathlib import Path

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

        settings = load_settings(**given)
        store = open_existing(settings)
    try:
        yield settings, store
    finally:
        store.close()


def open_existing(settings: Settings) -> Store:
    """Open the project's store; one that is not there is not made, since a name may be mistyped.

    Raises:
        WrongProject: it is another project's.
        StoreError: there is no such store, and which projects there are; or it cannot be opened.
        StoreTooNew: a newer release wrote it.
    """
    from art_patch.store import open_store

    require_project(settings)
    return open_store(settings.store_url, create=False, project=settings.project)


def refuse_foreign(settings: Settings) -> None:
    """See whether the store is another project's, for commands that open none; where it cannot be read nothing is said.

    Raises:
        WrongProject: it is.
    """
    import sqlite3

    from art_patch.errors import ArtPatchError, WrongProject
    from art_patch.store import of_another_project, read_route

    try:
        owner = read_route(settings.store_url).project
    except (ArtPatchError, sqlite3.Error, OSError, ValueError):
        return
    if owner not in (None, settings.project):
        raise WrongProject(of_another_project(settings.store_url, str(owner), settings.project))


def require_project(settings: Settings) -> None:
    """See whether the project's directory holds a store, unless the store lies elsewhere.

    Raises:
        StoreError: it does not, and these projects do.
    """
    from art_patch.errors import StoreError

    home, name = settings.directory.parent, settings.directory.name
    if settings.store is None and not _holds_store(settings.directory):
        others = sorted(path.parent.name for path in home.glob("*/store.db") if _holds_store(path.parent))
        if others:
            raise StoreError(
                f"there is no store of a project {name!r} in {home}, but of: {', '.join(others)}; name one of these "
                "with --project, or run your agent with art_patch.patch() first"
            )


def _holds_store(directory: Path) -> bool:
    try:
        return (directory / "store.db").stat().st_size > 0
    except OSError:
        return False
