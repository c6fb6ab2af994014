"""Database URLs; standard library only, because the app reads the route before SQLAlchemy is imported."""

from __future__ import annotations

from pathlib import Path

from art_patch.errors import ConfigError

_SQLITE = "sqlite:///"


def sqlite_path(url: str) -> Path:
    """Return the absolute file behind a `sqlite:///` URL.

    Raises:
        ConfigError: for any other URL.
    """
    if not url.startswith(_SQLITE) or url == _SQLITE:
        raise ConfigError(f"{url!r} is not a store this release opens; write sqlite:////absolute/path/store.db")
    return Path(url[len(_SQLITE) :]).absolute()
