"""When users came, in both databases."""

from __future__ import annotations

from art_patch.store import Store
from art_patch.types import TrajectoryInfo


def test_users_came_when_their_first_run_did(store: Store):
    assert store.read.arrivals(["ann"]) == (None, {})
    store.write(
        [
            TrajectoryInfo("a2", 20.0, "explicit", user_id="ann"),
            TrajectoryInfo("a1", 10.0, "explicit", user_id="ann"),
            TrajectoryInfo("b1", 30.0, "explicit", user_id="ben"),
            TrajectoryInfo("n1", 5.0, "explicit"),
            TrajectoryInfo("s1", 1.0, "shadow", user_id="ben"),
        ]
    )
    assert store.read.arrivals(["ben", "ann", "cid"]) == (5.0, {"ann": 10.0, "ben": 30.0})
