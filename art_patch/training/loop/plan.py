"""Plans an update: turns a job (the update's input) into the ordered list of its optimizer steps.

The same job always gives the same plan. So a checkpoint needs only the number of steps done to continue the plan.

An update has three phases. First it imitates demonstrations, then it learns pairs of a better and a worse answer, then
it learns from ranked groups. In each epoch a phase goes through its items in a random order, which depends only on the
seed, the phase and the epoch, and divides them into steps. If the config asks for rehearsal, each step on groups also
imitates a few known answers against forgetting, drawn by the seed and the number of the step alone.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from art_patch.training.data.packing import Example
from art_patch.training.loop.job import TrainGroup, TrainJob

PhaseName = Literal["imitate", "prefer", "groups"]

# Rehearsed rows a step: as many as a group has siblings, so that they cost about as much as one group more.
_REHEARSED = 8


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step of the plan."""

    phase: PhaseName  # "imitate" for demonstrations, "prefer" for pairs, or "groups"
    number: int  # number of the step within its phase, from 0
    epoch: int  # number of the pass over the phase's items, from 0
    last: bool  # whether this is the last step of its phase, or of the update
    items: tuple[int, ...]  # indices of the demonstrations, pairs or lessons (groups) that the step learns from
    rehearsed: tuple[int, ...] = ()  # indices into the job's `rehearsed` rows, which the step imitates as well


@dataclass(frozen=True, slots=True)
class Lesson:
    """A group with different rewards, as input of the loss."""

    # The siblings that go through the model: those whose advantage is not 0, or all siblings if the loss has a KL term.
    examples: tuple[Example, ...]
    on_policy: tuple[bool, ...]  # for each of them, whether the policy at the start of the update sampled all of it
    tokens: int  # number of sampled tokens in the rows of all siblings, also of those not in `examples`
    trajectories: int  # number of siblings that have a sampled token, also of those not in `examples`


def lessons_of(job: TrainJob) -> tuple[Lesson, ...]:
    """Returns a lesson (the loss's input) for each training group of a job; groups with equal rewards are left out."""
    return tuple(_lesson(group, job) for group in job.groups if group.teaches)


def evaluated_of(job: TrainJob) -> tuple[Lesson, ...]:
    """Returns the lessons of the evaluation groups, which are never trained on; none if `eval_steps` is `None`."""
    groups = () if job.config.eval_steps is None else job.evaluation
    return tuple(_lesson(group, job) for group in groups if group.teaches)


def _lesson(group: TrainGroup, job: TrainJob) -> Lesson:
    there = [each for each in group.siblings if each.example.rows]
    # A sibling with advantage 0 has no gradient, but the KL term holds it near the reference too.
    computed = [each for each in there if job.config.loss.kl_coefficient or each.example.advantage != 0.0]
    return Lesson(
        examples=tuple(each.example for each in computed),
        on_policy=tuple(each.on_policy for each in computed),
        # Of all siblings, computed or not: the loss is a mean over the group.
        tokens=sum(each.example.sampled for each in there),
        trajectories=len(there),
    )


def plan_of(job: TrainJob) -> tuple[Step, ...]:
    """Returns the optimizer steps of an update in order, at most `total_steps`; none if there is nothing to learn."""
    phases: tuple[tuple[PhaseName, int], ...] = (
        ("imitate", len(job.demonstrations)),
        ("prefer", len(job.pairs)),
        ("groups", len(lessons_of(job))),
    )
    steps = [step for name, items in phases for step in _steps(name, items, job)]
    most = job.config.total_steps
    if most is not None and most < len(steps):
        steps = steps[:most]
        steps[-1] = replace(steps[-1], last=True)  # the last step of a phase is always kept in a checkpoint
    return tuple(steps)


def _steps(phase: PhaseName, items: int, job: TrainJob) -> Iterator[Step]:
    if not items:
        return
    config = job.config
    batch, batches = config.batch_size, config.gradient_accumulation_steps
    each_epoch = min(config.minibatches, items) if batch is None else math.ceil(items / (batch * batches))
    edges = [round(i * items / each_epoch) for i in range(each_epoch + 1)]
    known = len(job.rehearsed) if phase == "groups" else 0
    for epoch in range(config.epochs):
        # An item is a whole group: siblings share what they begin with, and a step's normalisers count all of them.
        order = random.Random(f"{config.seed} {phase} {epoch}").sample(range(items), items)
        for number, (first, stop) in enumerate(pairwise(edges), start=epoch * each_epoch):
            # From seed and number alone, not from a running generator: a step after a kill draws the same rows.
            drawn = random.Random(f"{config.seed} rehearse {number}").sample(range(known), min(known, _REHEARSED))
            last = number + 1 == config.epochs * each_epoch
            yield Step(phase, number, epoch, last, tuple(order[first:stop]), tuple(sorted(drawn)))
