"""Pairs of answers to one prompt: the newest of both, with the same tools, and only where both answered."""

from __future__ import annotations

from art_patch.store import Store
from art_patch.types import JSON
from tests.support.store_samples import call, info


def asked(text: str) -> tuple[JSON, ...]:
    return ({"role": "user", "content": text},)


def test_the_newest_answers_of_both_to_a_prompt_are_paired(store: Store):
    store.write(
        [
            info(),
            call("01", policy="agent@0", messages=asked("plums?")),
            call("02", policy="agent@0", messages=asked("plums?")),
            call("03", policy="agent@1", messages=asked("plums?"), shadow_of="01"),
            call("04", policy="agent@1", messages=asked("pears?"), tools=()),
            call("05", policy="agent@0", messages=asked("pears?"), tools=()),
            call("06", policy="agent@0", messages=asked("apples?")),
            call("07", policy="agent@1", messages=asked("apples?"), tools=()),
            call("08", policy="agent@1", messages=asked("plums?"), status="error"),
            call("09", policy=None, messages=asked("pears?"), tools=()),
        ]
    )
    count, pairs = store.browse.answered_by_both("agent@0", "agent@1", limit=10)
    assert count == 2
    assert [(pair.a.id, pair.b.id) for pair in pairs] == [("05", "04"), ("02", "03")]
    whole = {one.id: one for one in store.read.trajectories(["t1"])[0].calls}
    assert pairs[1].a == whole["02"]
    assert [(pair.a.id, pair.b.id) for pair in store.browse.answered_by_both("agent@1", "agent@0", limit=1)[1]] == [
        ("04", "05")
    ]
    assert [(pair.a.id, pair.b.id) for pair in store.browse.answered_by_both(None, "agent@1", limit=5)[1]] == [
        ("09", "04")
    ]
    assert store.browse.answered_by_both("agent@0", "agent@7", limit=5) == (0, ())
