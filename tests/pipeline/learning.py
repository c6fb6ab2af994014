"""A store with scored groups and no engine: enough to see what an update would be given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from art_patch._lib.ids import new_id
from art_patch.pipeline import CycleConfig
from art_patch.pipeline.cycle_run import Cycle
from art_patch.policies import base_fingerprint
from art_patch.store import open_store
from art_patch.training import TrainConfig
from art_patch.types import Call, Group, Policy, Score, TrajectoryInfo
from tests.support.factory import make_call


class Learning:
    """A project whose champion is its base."""

    def __init__(self, directory: Path, base: Path) -> None:
        self.store = open_store(f"sqlite:///{directory}/store.db")
        self.adapters = directory / "adapters"
        sha256 = base_fingerprint(base)
        self.champion = self.store.ledger.add_base("agent@0", str(base), sha256, who="test")

    def cycle(self, **train: Any) -> Cycle:
        config = CycleConfig(train=TrainConfig(**train), holdout_share=0.0)
        nobody = cast("Any", None)
        return Cycle(
            self.store, nobody, config, lambda stage, done, total, note="": None, 100.0, nobody, self.adapters, "test"
        )

    def group(
        self, key: str, *siblings: tuple[float | None, Sequence[Call]], state: str = "scored",
        how: str = "same_task",
    ) -> Group:  # fmt: skip
        """Keep a group of runs; each has calls, and a reward if it was scored."""
        for number, (reward, calls) in enumerate(siblings):
            run = f"{key}-{number}"
            mine = [replace(call, trajectory_id=run, id=f"{run}-{n}") for n, call in enumerate(calls)]
            scores = [] if reward is None else [Score(new_id(), run, "reward", reward, "user", 1.0)]
            self.store.write([TrajectoryInfo(run, 1.0), *mine, *scores])
        runs = self.store.read.trajectories([f"{key}-{number}" for number in range(len(siblings))])
        group = Group(key, f"task:{key}", how, runs)
        self.store.ledger.add_groups([group], state=state, now=1.0)
        return group

    def candidate(self, step: int, *trained_on: str, parent: str = "agent@0") -> Policy:
        """Keep a policy that was trained on these groups."""
        name = f"agent@{step}"
        policy = replace(self.champion, name=name, state="candidate", parent=parent, path=str(self.adapters / name))
        self.store.ledger.add_candidate(policy, trained_on=trained_on, who="test")
        return policy


def answered(prompt: Sequence[int], answer: Sequence[int], finish: str = "stop", **changes: Any) -> Call:
    """A call that the base answered with exact tokens."""
    call = make_call(prompt=prompt, answer=answer, **changes)
    return replace(call, choices=(replace(call.choices[0], finish_reason=finish),))
