"""What trackers have already: noted, replaced, and erased with its trajectory."""

from __future__ import annotations

from art_patch.store import SentItem, Store
from tests.support.postgres import Execute
from tests.support.store_samples import call, info


def test_what_was_sent_is_known_by_target_and_goes_with_its_trajectory(store: Store, execute: Execute):
    store.write([info("t1", user_id="u"), call("c1", "t1"), info("t2"), call("c2", "t2")])
    store.sent.add("otlp a", [], now=1.0)
    store.sent.add("otlp a", [SentItem("span:1", "x", "t1"), SentItem("span:2", "y", "t2")], now=1.0)
    store.sent.add("otlp b", [SentItem("policy:agent@1", "z")], now=2.0)
    store.sent.add("otlp a", [SentItem("span:2", "Y", "t2")], now=3.0)
    items = ["span:1", "span:2", "span:3", "policy:agent@1"]
    assert store.sent.digests("otlp a", items) == {"span:1": "x", "span:2": "Y"}
    assert store.sent.digests("otlp b", items) == {"policy:agent@1": "z"}
    store.rights.erase(user="u", who="w")
    rows = execute("SELECT target, item, trajectory_id, digest, at FROM sent ORDER BY target, item")
    assert [tuple(row) for row in rows] == [
        ("otlp a", "span:2", "t2", "Y", 3.0),
        ("otlp b", "policy:agent@1", None, "z", 2.0),
    ]
    assert store.verify() == []
