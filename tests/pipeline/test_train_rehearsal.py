"""What is rehearsed: the model's own successes in groups that earlier updates were trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from art_patch._lib.ids import new_id
from art_patch.pipeline import train_given
from art_patch.pipeline.train_policy import make_job
from art_patch.rewards import Judge
from art_patch.training import Row, TrainJob
from art_patch.types import Correction
from tests.pipeline.learning import Learning, answered
from tests.support.cycles import TRAINING, Place, die_after, rewarded_traffic


@pytest.fixture
def learning(tmp_path: Path, base: Path) -> Iterator[Learning]:
    here = Learning(tmp_path, base)
    here.group("now", (0.0, [answered((1,), (2,))]), (1.0, [answered((1,), (3,))]))
    yield here
    assert here.store.verify() == []
    here.store.close()


def make(learning: Learning, **train: Any) -> tuple[TrainJob, dict[str, Any]]:
    cycle = learning.cycle(**train)
    groups = cycle.store.read.groups(state="scored", held_out=False)
    job = make_job(cycle, learning.champion, groups, learning.adapters / "agent@9")
    assert job is not None
    return job, cycle.metrics["train"]


def row(prompt: tuple[int, ...], answer: tuple[int, ...], temperature: float = 1.0) -> Row:
    given, said = len(prompt), len(answer)
    return Row(
        prompt + answer,
        (False,) * given + (True,) * said,
        (0.0,) * (given + said),
        (1.0,) * given + (temperature,) * said,
    )


def test_successes_of_earlier_groups_newest_first_each_once(learning: Learning):
    cool = {"params": {"temperature": 0.5}}
    learning.group(
        "a", (1.0, [answered((1, 2), (3,))]), (0.9, [answered((1, 2), (3,))]), (0.1, [answered((1, 2), (4,))]),
        state="trained",
    )  # fmt: skip
    learning.group("b", (0.9, [answered((5,), (6, 7), **cool)]), (0.2, [answered((5,), (8,))]), state="trained")
    learning.group("c", (1.0, [answered((9,), (9,))]), (0.0, [answered((9,), (8,))]), state="dead")
    job, metrics = make(learning, rehearse_from=0.9)
    assert job.rehearsal == (row((5,), (6, 7), 0.5), row((1, 2), (3,)))
    assert job.others == ("b-0", "a-0")
    assert metrics["rehearsal"] == {"rows": 2, "left_out": {"reward too low": 2, "nothing in it is new": 1}}
    assert job.metrics == metrics


def test_what_is_no_success_of_this_model_is_left_out_and_counted(learning: Learning):
    foreign = replace(answered((5,), (6,)), policy="bob@3")
    upstream = replace(answered((5,), (6,)), policy=None, untrainable="answered by upstream")
    siblings = [answered((5,), (6,), "length")], [foreign], [upstream], [answered((5,), (7,))]
    learning.group("a", *((1.0, calls) for calls in siblings), state="trained")
    message = {"role": "assistant", "content": "no"}
    learning.store.write([Correction(new_id(), "a-3", 1.0, "user", message)])
    job, metrics = make(learning, rehearse_from=0.5, learn_truncated=False)
    assert (job.rehearsal, job.others) == ((), ())
    assert metrics["rehearsal"] == {
        "rows": 0,
        "left_out": {"nothing in it may be trained": 1, "not sampled by this model": 2, "somebody corrected it": 1},
    }


def test_the_first_cycle_has_nothing_to_rehearse_and_says_so(learning: Learning):
    job, metrics = make(learning, rehearse_from=0.5)
    assert job.rehearsed == ()
    assert metrics["rehearsal"] == {"rows": 0, "left_out": {}}
    job, metrics = make(learning)
    assert "rehearsal" not in metrics


def test_no_more_is_kept_than_an_update_can_see(learning: Learning, monkeypatch: pytest.MonkeyPatch):
    for number in range(4):
        learning.group(f"g{number}", (1.0, [answered((number,), (5,))]), (0.0, []), state="trained")
    monkeypatch.setattr(train_given, "_ROWS", 2)
    job, _ = make(learning, rehearse_from=0.5)
    assert [each.ids_T for each in job.rehearsal] == [(3, 5), (2, 5)]
    monkeypatch.setattr(train_given, "_GROUPS", 1)
    job, _ = make(learning, rehearse_from=0.5)
    assert job.others == ("g3-0",)


REHEARSING = replace(TRAINING, train=replace(TRAINING.train, rehearse_from=0.5))


def test_the_second_cycle_rehearses_the_first_and_erasing_knows_of_it(place: Place, judge: Judge):
    rewarded_traffic(place)
    assert place.cycle(judge, REHEARSING).metrics["train"]["rehearsed"] == 0
    (first, *_) = (
        run.id
        for group in place.store.read.groups(state="trained")
        for run in group.trajectories
        if run.scores[0].value >= 0.5
    )
    rewarded_traffic(place, "agent@1", seed=1)
    die_after(place, judge, 3, REHEARSING)
    rewarded_traffic(place, "agent@1", seed=2)
    train = place.cycle(judge, REHEARSING).metrics["train"]
    assert train["resumed"] is True
    assert train["rehearsed"] == train["rehearsal"]["rows"] > 8
    assert all(step["rehearse_nll_nats"] > 0 for step in train["history"])
    erasure = place.store.rights.erase(trajectory=first, dry_run=True)
    assert [policy.name for policy in erasure.policies] == ["agent@1", "agent@2"]


def test_what_was_erased_meanwhile_is_not_rehearsed(place: Place, judge: Judge):
    rewarded_traffic(place)
    place.cycle(judge, REHEARSING)
    earlier = place.store.read.groups(state="trained")
    rewarded_traffic(place, "agent@1", seed=1)
    die_after(place, judge, 3, REHEARSING)
    for run in earlier[0].trajectories:
        place.store.rights.erase(trajectory=run.id)
    train = place.cycle(judge, REHEARSING).metrics["train"]
    assert "resumed" not in train
    kept = sum(run.scores[0].value >= 0.5 for group in earlier[1:] for run in group.trajectories)
    assert train["rehearsed"] + train["rehearsal"]["left_out"].get("nothing in it is new", 0) <= kept
