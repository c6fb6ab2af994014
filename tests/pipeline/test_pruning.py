"""The end of a cycle deletes what is older than is kept, whatever became of the cycle."""

from __future__ import annotations

from pathlib import Path

import pytest

from art_patch.errors import JudgeError
from art_patch.pipeline import CycleConfig, retrain
from art_patch.pipeline.cycle import pruning_at_end
from art_patch.store import Store, open_store
from art_patch.types import Call, TrajectoryInfo

DAY_S = 86_400.0


@pytest.fixture
def store(tmp_path: Path):
    opened = open_store(f"sqlite:///{tmp_path}/store.db")
    for day in range(4):
        key = f"day-{day}"
        opened.write([TrajectoryInfo(key, day * DAY_S), Call(key, key, day * DAY_S, "m", ())])
    yield opened
    opened.close()


def quiet(*_: object) -> None:
    """No progress."""


def left(store: Store) -> list[str]:
    return sorted(one.id for one in store.read.recent())


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (CycleConfig(), [0, 1, 2, 3]),
        (CycleConfig(keep_days=2.5), [2, 3]),
        (CycleConfig(keep_trajectories=1), [3]),
        (CycleConfig(keep_days=1.5, keep_trajectories=3), [3]),
    ],
)
def test_a_cycle_with_nothing_to_do_prunes(store: Store, tmp_path: Path, config: CycleConfig, kept: list[int]):
    report = retrain(
        store,
        None,  # type: ignore[arg-type] - never asked
        None,  # type: ignore[arg-type]
        tmp_path / "adapters",
        config,
        who="me",
        progress=quiet,
        now=4 * DAY_S,
    )
    assert (report.outcome, left(store)) == ("nothing to do", [f"day-{day}" for day in kept])


def test_a_cycle_extends_the_search_index_or_deletes_it(store: Store, tmp_path: Path):
    for wanted, lacks in ((False, 4), (True, 0), (False, 4)):
        with pruning_at_end(store, CycleConfig(search=wanted, keep_days=9), quiet, who="me", now=4 * DAY_S):
            pass
        assert store.search.lag() == lacks
    late = Call("late", "day-0", 1.0, "m", ())
    with pruning_at_end(store, CycleConfig(), quiet, who="me", now=4 * DAY_S):
        store.write([late])
    assert store.search.extend(thorough=True) == 0


def test_a_judge_that_is_down_keeps_nothing_for_longer(store: Store):
    with (
        pytest.raises(JudgeError),
        pruning_at_end(store, CycleConfig(keep_trajectories=1), quiet, who="me", now=4 * DAY_S),
    ):
        raise JudgeError("down")
    assert left(store) == ["day-3"]


def test_whoever_is_interrupted_is_let_go_at_once(store: Store):
    with (
        pytest.raises(KeyboardInterrupt),
        pruning_at_end(store, CycleConfig(keep_trajectories=1), quiet, who="me", now=4 * DAY_S),
    ):
        raise KeyboardInterrupt
    assert len(left(store)) == 4
