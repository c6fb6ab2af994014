"""Reading the route in the app: one short query with the standard library's sqlite3, about a millisecond.

`patch()` calls this before the first request, when importing SQLAlchemy would cost the app half a second.
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

from art_patch.records import Route
from art_patch.store.forking import in_sqlite
from art_patch.store.urls import sqlite_path

ROUTE_KEY = "route"
MODE_KEY = "mode"
CANARY_KEY = "canary_percent"

_QUERY = "SELECT key, value FROM control WHERE key IN (?, ?, ?)"


def read_route(url: str) -> Route:
    """Return where calls go now; an empty `Route` if there is no store yet.

    Raises:
        sqlite3.Error: if the store exists and cannot be read.
    """
    path: Path = sqlite_path(url)
    if not path.exists():
        return Route()
    with in_sqlite():
        connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=0.2)
        try:
            rows = dict(connection.execute(_QUERY, (ROUTE_KEY, MODE_KEY, CANARY_KEY)))
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):  # another process is creating the store right now
                return Route()
            raise
        finally:
            connection.close()
    route = json.loads(rows.get(ROUTE_KEY, "{}"))
    return Route(
        mode=rows.get(MODE_KEY),  # pyright: ignore[reportArgumentType] - written by Ledger.set_mode, which checks it
        champion=route.get("champion"),
        base_url=route.get("base_url"),
        key_file=route.get("key_file"),
        canary_percent=float(rows[CANARY_KEY]) if CANARY_KEY in rows else None,
        engine_since=route.get("engine_since"),
    )
