"""The store: every call, trajectory, group, score and policy, in one SQLite file.

`open_store(url)` gives a `Store`. The app's writer thread calls `write`; the job reads trajectories, keeps groups and
scores, and moves policies; `art-patch serve` publishes the route. README.md beside this file has tables and decisions.

Importing the package does not import SQLAlchemy: `patch()` reads the route (`store.route`) before the first call, and
must not cost the app half a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["Store", "open_store"]

if TYPE_CHECKING:
    from art_patch.store.store import Store, open_store
else:

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from art_patch.store import store

        return getattr(store, name)
