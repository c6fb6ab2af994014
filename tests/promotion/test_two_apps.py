"""Two app processes, a real engine, and a third process that decides: who answers changes in both, without a redeploy.

What is asserted is what each app answers once it says that it has read the route; how long that may take is its poll
interval, which `tests/benchmarks` measures.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.two_apps import Place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(tmp_path, stack)


def went_back(place: Place) -> tuple[str | None, str | None]:
    """Who serves after a rollback, and whose test it ended."""
    told = place.decide("rollback")
    return told["champion"], told["rejected"]


@pytest.mark.slow
def test_both_apps_follow_a_canary_and_every_way_back(place: Place):
    one, other = place.apps
    assert [app.answer("first") for app in place.apps] == [
        "agent@0",
        "agent@0",
    ]  # an app looks at the store from then on
    place.follow(champion="agent@0", challenger=None)

    # A canary: sticky by session, alike in both processes.
    place.decide("promote", "agent@1", "--canary", "50")
    place.follow(challenger="agent@1")
    sides = one.answers()
    assert set(sides.values()) == {"agent@0", "agent@1"}
    assert other.answers() == sides
    theirs = next(session for session, policy in sides.items() if policy == "agent@1")
    assert one.answer(theirs, run="begun") == "agent@1"

    # Given up with the engine up: also by the run that it had begun.
    assert went_back(place) == ("agent@0", "agent@1")
    place.follow(champion="agent@0", challenger=None)
    assert one.answer(theirs, run="begun") == "agent@0"
    assert set(one.answers().values()) == set(other.answers().values()) == {"agent@0"}

    # Promoted, and gone back from.
    place.decide("promote", "agent@2")
    place.follow(champion="agent@2")
    assert set(one.answers().values()) == {"agent@2"}
    place.decide("promote", "agent@3", "--canary", "50")
    place.follow(challenger="agent@3")
    assert set(other.answers().values()) == {"agent@2", "agent@3"}

    # The engine dies. The canary is given up and the champion gone back from all the same.
    place.server.stop(signal.SIGKILL)
    assert went_back(place) == ("agent@2", "agent@3")
    assert went_back(place) == ("agent@0", None)
    place.follow(champion="agent@0", challenger=None)
    assert {one.answer("s0"), other.answer("s0")} == {"upstream"}

    # When it is back it answers as was decided meanwhile.
    with ExitStack() as stack:
        address = place.serve(stack).ready["base_url"]
        place.follow(champion="agent@0", challenger=None, engine=address)
        assert set(one.answers().values()) == set(other.answers().values()) == {"agent@0"}
    assert place.store.verify() == []
    moves = [(move["policy"], move["to_state"]) for move in place.store.ledger.history(limit=8)]
    assert moves == [
        ("agent@2", "retired"),
        ("agent@0", "champion"),
        ("agent@3", "rejected"),
        ("agent@3", "canary"),
        ("agent@0", "retired"),
        ("agent@2", "champion"),
        ("agent@1", "rejected"),
        ("agent@1", "canary"),
    ]
