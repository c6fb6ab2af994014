"""What any tracker is given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from art_patch.store import Filter
from art_patch.trackers import feed
from art_patch.trackers.episodes import Item, TrainingStep
from art_patch.types import Policy
from tests.trackers.policies import filled


class Collecting:
    """A tracker that keeps where each policy's files lie."""

    name, target = "collecting", "collecting:here"

    def __init__(self) -> None:
        self.paths: dict[str, str | None] = {}

    def of_step(self, step: TrainingStep) -> Iterable[Item]:
        self.paths[step.policy.name] = step.policy.path
        return ()

    def write(self, items: Sequence[Item]) -> None:
        assert not items


def test_files_of_a_policy_that_lies_elsewhere_are_not_sent(tmp_path: Path):
    store, tracker, adapters = filled(tmp_path), Collecting(), tmp_path / "shop" / "adapters"
    for name, path in (("agent@2", "/home/victim"), ("agent@3", str(adapters / "agent@1"))):
        other = Policy(name, "/base", "ff", "candidate", 62.0, path, "agent@1")
        store.ledger.add_candidate(other, trained_on=(), who="w")
    feed(store, tracker, Filter(), who="w", progress=lambda *_: None, now=100.0, adapters=adapters)
    own = str(adapters / "agent@1")
    assert tracker.paths == {"agent@0": None, "agent@1": own, "agent@2": None, "agent@3": None}
    store.close()
