"""Reads the URL of a store. Standard library only, because the app reads the route before SQLAlchemy is imported.

A PostgreSQL URL may hold a password. No message of this module shows it, and callers pass a URL through
`without_password` before they show it.
"""

import re
from pathlib import Path
from urllib.parse import parse_qsl, unquote

from art_patch.errors import ConfigError

_SQLITE = "sqlite:///"
_POSTGRES = "postgresql+psycopg://"
_LOGIN = re.compile(r"(?<=://)([^:@/?]*):.*@", re.DOTALL)
_IN_QUERY = re.compile(r"([?&]\w*password=)[^&]*", re.IGNORECASE)


def sqlite_path(url: str) -> Path:
    """Return the absolute path of the file that a `sqlite:///` URL names; any other URL raises `ConfigError`."""
    if not url.startswith(_SQLITE) or url == _SQLITE:
        shown = without_password(url)
        if url.startswith(("postgresql", "postgres:")):
            where = "@host/database" if _POSTGRES in url else url.partition("://")[2].rpartition("@")[2]
            raise ConfigError(f"{shown!r} names no driver that we use; write {_POSTGRES}USER@{where.lstrip('@')}")
        raise ConfigError(
            f"{shown!r} is not a store this release opens; "
            f"write sqlite:////absolute/path/store.db or {_POSTGRES}user@host/database"
        )
    return Path(url[len(_SQLITE) :]).absolute()


def is_postgres(url: str) -> bool:
    """Return whether the URL names a PostgreSQL server."""
    return url.startswith(_POSTGRES)


def waits_for_network(url: str | None) -> bool:
    """Return whether the store at this URL is read over a network. `None` is the default URL, which names a file."""
    return url is not None and is_postgres(url)


def absolute_url(url: str) -> str:
    """Return the URL with an absolute path; `ConfigError` if it names neither SQLite nor PostgreSQL."""
    return url if is_postgres(url) else f"{_SQLITE}{sqlite_path(url)}"


def without_password(url: str) -> str:
    """Return the URL without its password, so that messages and logs can show it."""
    # Everything between the user's name and the last `@` goes, even if the URL is malformed: a password that holds an
    # unescaped `@` or `/` must not be shown in part.
    return _IN_QUERY.sub(r"\1***", _LOGIN.sub(r"\1:***@", url))


def postgres_parameters(url: str) -> dict[str, str]:
    """Return the parts and query parameters of a PostgreSQL URL by libpq's names; `ConfigError` if it is malformed."""
    rest, _, query = url.removeprefix(_POSTGRES).partition("?")
    authority, _, database = rest.partition("/")
    login, _, places = authority.rpartition("@")
    user, _, password = login.partition(":")
    hosts, ports = zip(*map(_place, places.split(",")), strict=True)
    # A bare @ in the password would end it for SQLAlchemy, which opens the store: the two must mean one server.
    if not all(port.isdigit() or not port for port in ports) or "@" in login or "/" in database or "@" in database:
        # The message shows no part of the URL by itself: a part may be half of the password.
        raise ConfigError(
            f"{without_password(url)!r} cannot be read; write {_POSTGRES}user:password@host:5432/database, "
            "and / ? # @ : % in the password as %2F %3F %23 %40 %3A %25"
        )
    found = {"user": user, "password": password, "dbname": database}
    found |= {"host": ",".join(hosts), "port": ",".join(ports) if any(ports) else ""}
    return {name: unquote(value) for name, value in found.items() if value} | dict(parse_qsl(query))


def host_of(url: str) -> str | None:
    """Return the host and port of the server that a URL names; `None` for a file, or a URL that cannot be read."""
    if not is_postgres(url):
        return None
    try:
        found = postgres_parameters(url)
    except ConfigError:
        return None
    return ":".join(part for name in ("host", "port") if (part := found.get(name, ""))) or "localhost"


def is_unknown(url: str, project: str, names: list[str]) -> str:
    """Return the error message for a store at `url` that has no such project, but those with these `names`."""
    return (
        f"store {without_password(url)} has no project {project!r}, but: {', '.join(names)}; name one of these with "
        "--project (ART_PATCH_PROJECT), or run your agent with art_patch.patch() first"
    )


def missing_driver(url: str, error: ImportError) -> str:
    """Return the error message for a PostgreSQL URL when its driver, psycopg, is not installed."""
    return f"{without_password(url)} needs psycopg ({error}); pip install 'art-patch[postgres]'"


def _place(place: str) -> tuple[str, str]:
    host, colon, port = place.rpartition(":")
    if not colon or port.endswith("]"):  # an IPv6 address is full of colons
        host, port = place, ""
    return host.strip("[]"), port
