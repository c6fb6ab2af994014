"""Reads the route in the app: one short query, without SQLAlchemy, whose import would cost the app half a second.

Reading the route from a SQLite file takes a millisecond with the standard library's sqlite3, and `patch()` does it
before the first request. Reading it from a PostgreSQL server may be slow. So there only the recorder's thread reads it,
over the connections of its open store, or over a short connection of its own while no store is open.
"""

import json
import sqlite3
import time
import weakref
from collections.abc import Mapping
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Protocol

from art_patch._lib.forking import in_database, late_import
from art_patch.errors import ConfigError, StoreError
from art_patch.store.backends import urls
from art_patch.store.schema import EVERY_AGENT, FIRST
from art_patch.types import Route

ROUTE_KEY = "route"
MODE_KEY = "mode"
CANARY_KEY = "canary_percent"
CONTROL_KEY = "control_group"
"""Since when which percentage of the sessions stays with upstream, as JSON pairs of time and percent, newest last."""

# Time to connect for an app that has not opened the store yet.
CONNECT_TIMEOUT_S = 2

_LOOKS_AGAIN = 3
_BETWEEN_LOOKS_S = 0.01

# The route of a project as pairs of key and value; `project` is its id as an SQL expression.
QUERY = f"""
    SELECT key, value FROM control WHERE project_id = {{project}} AND agent_id IN ({EVERY_AGENT}, {FIRST})
    AND key IN ('{ROUTE_KEY}', '{MODE_KEY}', '{CANARY_KEY}', '{CONTROL_KEY}')
"""
# A store whose project has no name yet is any project's, as in `Database._bind`. Each driver has its own `mark`.
_OF_NAME = "(SELECT id FROM projects WHERE name = {mark} OR name IS NULL ORDER BY name IS NULL LIMIT 1)"
_OF_ONLY = "(SELECT id FROM projects WHERE 1 = (SELECT count(*) FROM projects))"


class Control(Protocol):
    """An open store whose connections `read_route` can use to read the route from a PostgreSQL server."""

    def control(self) -> Mapping[str, str]:
        """Return the rows that `QUERY` finds, as key and value."""
        ...


_open: weakref.WeakValueDictionary[tuple[str, str | None], Control] = weakref.WeakValueDictionary()


def answers_for(url: str, project: str | None, store: Control) -> None:
    """Register a project's open store, so that later calls of `read_route(url, project)` use its connections."""
    _open[url, project] = store


def answers_no_more(url: str, project: str | None, store: Control) -> None:
    """Undo `answers_for` when `store` closes, unless another store has been registered since."""
    if _open.get((url, project)) is store:
        del _open[url, project]


def read_route(url: str, project: str | None = None) -> Route:
    """Return where the calls of a project go now; an empty `Route` if the store or the project is not there yet.

    `project` may be `None` for the store's only one. Raises `sqlite3.Error` for a file that cannot be read,
    `StoreError` for a server, and `ConfigError` for a URL of neither, or without psycopg.
    """
    return route_of((_from_server if urls.is_postgres(url) else _from_file)(url, project))


def route_of(rows: Mapping[str, str]) -> Route:
    """Return the route that the rows of `QUERY` state."""
    route = json.loads(rows.get(ROUTE_KEY, "{}"))
    challenger = route.get("challenger") or {}
    return Route(
        mode=rows.get(MODE_KEY),  # pyright: ignore[reportArgumentType] - written by Ledger.set_mode, which checks it
        champion=route.get("champion"),
        learner=route.get("learner"),
        base_url=route.get("base_url"),
        key_file=route.get("key_file"),
        canary_percent=float(rows[CANARY_KEY]) if CANARY_KEY in rows else None,
        engine_since=route.get("engine_since"),
        challenger=challenger.get("policy"),
        challenger_state=challenger.get("state"),
        challenger_percent=challenger.get("percent"),
        challenger_since=challenger.get("since"),
        control_percent=shares[-1][1] if (shares := json.loads(rows.get(CONTROL_KEY, "[]"))) else 0.0,
    )


def _from_file(url: str, project: str | None) -> Mapping[str, str]:
    path = urls.sqlite_path(url)
    for _ in range(_LOOKS_AGAIN):
        try:
            return _ask_file(path, project)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:  # it has waited for `timeout` already
                raise
            # The file may have been deleted or made during the query. Any other error comes again below.
            time.sleep(_BETWEEN_LOOKS_S)
    return _ask_file(path, project)


def _ask_file(path: Path, project: str | None) -> Mapping[str, str]:
    if not path.exists():
        return {}
    # A short timeout, because the app's first request waits for this. `mode=ro` never creates a file.
    with in_database(), closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=0.2)) as connection:
        try:
            return dict(connection.execute(*_query(project, "?")))
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):  # another process is creating the store right now
                return {}
            raise


def _query(project: str | None, mark: str) -> tuple[str, tuple[str, ...]]:
    if project is None:
        return QUERY.format(project=_OF_ONLY), ()
    return QUERY.format(project=_OF_NAME.format(mark=mark)), (project,)


def _from_server(url: str, project: str | None) -> Mapping[str, str]:
    if (store := _open.get((url, project))) is not None:
        return store.control()
    parameters = {"connect_timeout": str(CONNECT_TIMEOUT_S)} | urls.postgres_parameters(url)
    with late_import():
        try:
            psycopg = import_module("psycopg")
        except ImportError as error:
            raise ConfigError(urls.missing_driver(url, error)) from None
    try:
        with (
            in_database(),
            closing(psycopg.connect(**parameters, application_name="art_patch", autocommit=True)) as connection,
        ):
            return dict(connection.execute(*_query(project, "%s")).fetchall())
    except psycopg.errors.UndefinedTable:  # nobody has written yet
        return {}
    except psycopg.Error as error:
        words = " ".join(str(error).split())
        failed = StoreError(f"store {urls.without_password(url)}: {words}; see that the server runs")
        failed.host = urls.host_of(url)
        raise failed from None
