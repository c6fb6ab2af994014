"""A job is the same after it was a file; its plan depends on nothing else."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_patch.errors import TrainingError
from art_patch.training import Example, LossConfig, Pair, Row, Sibling, TrainConfig, TrainGroup, TrainJob, read_job
from art_patch.training.loop import job as job_files
from art_patch.training.loop.job import JOB, claim, plan_of
from tests.support.train_jobs import row

logprobs = st.floats(-50, 0)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    tokens = draw(st.integers(1, 6))

    def some(values: st.SearchStrategy[object]) -> tuple[object, ...]:
        return draw(st.tuples(*(values,) * tokens))

    ids, sampled = some(st.integers(0, 2**31)), some(st.booleans())
    return Row(ids, (*sampled[1:], True), some(logprobs), some(st.floats(0.1, 2)))  # type: ignore[arg-type]


siblings = st.builds(
    Sibling,
    st.text(max_size=5),
    st.builds(Example, st.lists(rows(), max_size=3).map(tuple), st.floats(-3, 3)),
    st.booleans(),
)
groups = st.lists(st.builds(TrainGroup, st.text(max_size=5), st.lists(siblings, max_size=4).map(tuple))).map(tuple)
jobs = st.builds(
    TrainJob,
    base=st.text(max_size=5),
    base_sha256=st.just("0" * 64),
    parent=st.sampled_from([None, Path("/adapters/agent@1")]),
    target=st.just(Path("/adapters/agent@2")),
    config=st.builds(
        lambda sizes, **others: TrainConfig(batch_size=sizes[0], gradient_accumulation_steps=sizes[1], **others),
        sizes=st.just((None, 1)) | st.tuples(st.integers(1, 3), st.integers(1, 2)),
        loss=st.builds(LossConfig, name=st.sampled_from(["dapo", "gspo"])),
        minibatches=st.integers(1, 5),
        epochs=st.integers(1, 3),
        seed=st.integers(0, 3),
        rehearse_from=st.none() | st.just(0.5),
    ),
    groups=groups,
    evaluation=groups,
    demonstrations=st.lists(rows(), max_size=3).map(tuple),
    rehearsal=st.lists(rows(), max_size=12).map(tuple),
    pairs=st.lists(st.builds(Pair, rows(), rows(), st.sampled_from(["correction", "group"])), max_size=2).map(tuple),
    others=st.lists(st.text(max_size=3)).map(tuple),
    mean_reward=st.none() | st.floats(-1, 1),
    metrics=st.dictionaries(st.text(max_size=3), st.none() | st.integers() | st.lists(st.text(max_size=3))),
)


@given(jobs)
def test_a_job_is_the_same_after_it_was_a_file(tmp_path_factory: pytest.TempPathFactory, job: TrainJob):
    directory = tmp_path_factory.mktemp("job")
    claim(directory, job)
    found = read_job(directory)
    assert found == job
    assert found.fingerprint == job.fingerprint
    claim(directory, job)
    with pytest.raises(TrainingError, match="belongs to another update"):
        claim(directory, replace(job, config=replace(job.config, seed=job.config.seed + 1)))
    assert [path.name for path in directory.iterdir()] == [JOB]


def test_a_directory_without_a_job_is_nobodys(tmp_path: Path):
    assert read_job(tmp_path) is None


@pytest.mark.parametrize("format", [0, 7])  # 7: without the champion
def test_a_job_of_another_release_says_so(tmp_path: Path, format: int):
    job_files.write_file(tmp_path / JOB, job_files.file_content({}, {"format": format}))
    with pytest.raises(TrainingError, match="another release; delete it"):
        read_job(tmp_path)


@given(jobs)
def test_a_plan_takes_everything_once_an_epoch_and_whole_groups(job: TrainJob):
    plan = plan_of(job)
    items = {"imitate": len(job.demonstrations), "prefer": len(job.pairs), "groups": len(job.lessons)}
    assert Counter((step.phase, step.epoch, item) for step in plan for item in step.items) == {
        (phase, epoch, item): 1
        for phase, number in items.items()
        for epoch in range(job.config.epochs)
        for item in range(number)
    }
    assert all(step.items for step in plan)
    phases = [phase for phase in items if items[phase]]
    assert [step.phase for step in plan if step.number == 0] == phases
    assert [step.phase for step in plan if step.last] == phases
    for phase in phases:
        its = [step for step in plan if step.phase == phase]
        assert [step.number for step in its] == list(range(len(its)))
        batch, most = job.config.batch_size, items[phase]
        size = None if batch is None else batch * job.config.gradient_accumulation_steps
        each_epoch = min(job.config.minibatches, most) if size is None else math.ceil(most / size)
        assert len(its) == job.config.epochs * each_epoch
        assert size is None or max(len(step.items) for step in its) <= size
    assert plan == plan_of(job)


@given(jobs, st.integers(1, 9))
def test_a_plan_of_fewer_steps_is_the_beginning_of_the_whole_one(job: TrainJob, most: int):
    whole = plan_of(job)
    short = plan_of(replace(job, config=replace(job.config, total_steps=most)))
    alike = [[replace(step, last=False, of=0) for step in steps] for steps in (short, whole[:most])]
    assert alike[0] == alike[1]
    assert all(step.of == sum(other.phase == step.phase for other in short) for step in short)
    assert not short or short[-1].last


@given(jobs)
def test_steps_on_groups_rehearse_a_few_rows_of_the_seeds_choice(job: TrainJob):
    asked = job.config.rehearse_from is not None
    assert job.rehearsed == ((*job.rehearsal, *job.demonstrations) if asked else ())
    for step in plan_of(job):
        known = len(job.rehearsed) if step.phase == "groups" else 0
        assert len(step.rehearsed) == len(set(step.rehearsed)) == min(8, known)
        assert set(step.rehearsed) <= set(range(known))


def test_each_step_rehearses_other_rows_and_another_seed_others_again():
    group = TrainGroup("g", tuple(Sibling(f"{a}", Example((row((1,), (2,)),), a), True) for a in (1.0, -1.0)))
    earlier = tuple(row((1,), (token,)) for token in range(40))
    config = TrainConfig(epochs=2, minibatches=2, rehearse_from=0.5)
    job = TrainJob("b", "0", None, Path("a@1"), config, groups=(group,) * 2, rehearsal=earlier)
    drawn = [step.rehearsed for step in plan_of(job)]
    assert len(set(drawn)) == len(drawn) == 4
    assert not set(drawn) & {step.rehearsed for step in plan_of(replace(job, config=replace(config, seed=1)))}


@given(jobs)
def test_lessons_hold_what_is_computed_and_count_the_rest(job: TrainJob):
    near = replace(job, config=replace(job.config, loss=replace(job.config.loss, kl_coefficient=0.1)))
    teaching = [group for group in job.groups if any(s.example.advantage and s.example.rows for s in group.siblings)]
    for lesson, held, group in zip(job.lessons, near.lessons, teaching, strict=True):
        there = [sibling.example for sibling in group.siblings if sibling.example.rows]
        assert lesson.examples == tuple(example for example in there if example.advantage)
        assert held.examples == tuple(there)
        for each in (lesson, held):
            assert (each.tokens, each.trajectories) == (sum(example.sampled for example in there), len(there))


def test_with_an_anchor_weight_a_lessons_turns_have_advantages_of_their_own():
    # Both are told 8 after their first answer; a third began elsewhere.
    told = [((row((1,), (token,)), row((8,), (token,))), advantage) for token, advantage in ((2, 1.0), (3, 0.0))]
    siblings = [Sibling(f"{n}", Example(*each), True) for n, each in enumerate([*told, ((row((4,), (5,)),), -1.0)])]
    config = TrainConfig(anchor_weight=1.0)
    job = TrainJob("b", "0", None, Path("a@1"), config, groups=(TrainGroup("g", tuple(siblings)),))
    (lesson,) = job.lessons
    assert [each.token_advantages for each in lesson.examples] == [(0.75, 0.75), (-0.25, -0.25), (-0.5,)]
    (plain,) = replace(job, config=TrainConfig()).lessons
    assert [each.token_advantages for each in plain.examples] == [None, None]  # 0 has no gradient


def test_the_order_is_the_seeds_and_differs_between_epochs():
    group = TrainGroup("g", tuple(Sibling(f"{a}", Example((row((1,), (2,)),), a), True) for a in (1.0, -1.0)))
    config = TrainConfig(epochs=2, minibatches=8)
    job = TrainJob("b", "0", None, Path("a@1"), config, groups=(group,) * 20)
    first, second = ([step.items for step in plan_of(job) if step.epoch == epoch] for epoch in (0, 1))
    assert first != second
    assert [step.items for step in plan_of(replace(job, config=replace(config, seed=1)))][:8] != first
    assert [step.items for step in plan_of(replace(job, config=replace(config, epochs=1)))] == first
    assert {len(items) for items in first} == {2, 3}
