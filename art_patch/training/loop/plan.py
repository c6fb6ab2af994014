"""A job to the optimizer steps it takes, in order. Pure: the same job has the same plan, so a place in it is a number.

First demonstrations are imitated, then pairs told apart, then groups ranked. Each phase goes through its items in an
order drawn from seed and epoch alone, cut into steps. A group is never divided: siblings share what they begin with,
and the normalisers of a step count all of them. Each step on groups rehearses some earlier answers as well, drawn from
seed and step alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from art_patch.training.data.packing import Example
from art_patch.training.loop.job import TrainGroup, TrainJob

PhaseName = Literal["imitate", "prefer", "groups"]

_REHEARSED = 8
"""Rows a step: as many as a group has siblings, so that they cost about as much as one group more."""


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step.

    Attributes:
        phase: what it belongs to.
        number: within its phase, from 0.
        epoch: from 0.
        last: it ends its phase.
        items: of the phase, that it learns from.
        rehearsed: rows of the job's `rehearsed` that it imitates as well.
    """

    phase: PhaseName
    number: int
    epoch: int
    last: bool
    items: tuple[int, ...]
    rehearsed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Lesson:
    """A group that teaches something.

    Attributes:
        examples: that are computed: whatever did better or worse, and the rest too if it is held near a reference.
        on_policy: for each of them, whether the policy that the update starts from sampled it.
        tokens: sampled by all siblings.
        trajectories: siblings that sampled any.
    """

    examples: tuple[Example, ...]
    on_policy: tuple[bool, ...]
    tokens: int
    trajectories: int


def lessons_of(job: TrainJob) -> tuple[Lesson, ...]:
    """Return what is learned from groups; groups that teach nothing are not there."""
    return _lessons(job.groups, job)


def evaluated_of(job: TrainJob) -> tuple[Lesson, ...]:
    """Return what the policy is evaluated on, as lessons that nobody learns; nothing unless the config asks for it."""
    return () if job.config.eval_steps is None else _lessons(job.evaluation, job)


def _lessons(groups: Sequence[TrainGroup], job: TrainJob) -> tuple[Lesson, ...]:
    everyone = bool(job.config.loss.kl_coefficient)
    return tuple(_lesson(group, everyone) for group in groups if group.teaches)


def _lesson(group: TrainGroup, everyone: bool) -> Lesson:
    there = [each for each in group.siblings if each.example.rows]
    computed = [each for each in there if everyone or each.example.advantage != 0.0]
    return Lesson(
        examples=tuple(each.example for each in computed),
        on_policy=tuple(each.on_policy for each in computed),
        tokens=sum(each.example.sampled for each in there),
        trajectories=len(there),
    )


def plan_of(job: TrainJob) -> tuple[Step, ...]:
    """Return the steps; none if there is nothing to learn."""
    config = job.config
    phases: tuple[tuple[PhaseName, int, int], ...] = (
        ("imitate", len(job.demonstrations), config.epochs),
        ("prefer", len(job.pairs), config.epochs),
        ("groups", len(lessons_of(job)), config.epochs),
    )
    steps = [step for name, items, epochs in phases for step in _steps(name, items, epochs, job)]
    if config.total_steps is not None and config.total_steps < len(steps):
        steps = steps[: config.total_steps]
        steps[-1] = replace(steps[-1], last=True)
    return tuple(steps)


def _steps(phase: PhaseName, items: int, epochs: int, job: TrainJob) -> Iterator[Step]:
    if not items:
        return
    batch, batches = job.config.batch_size, job.config.gradient_accumulation_steps
    each_epoch = min(job.config.minibatches, items) if batch is None else math.ceil(items / (batch * batches))
    known = len(job.rehearsed) if phase == "groups" else 0
    for epoch in range(epochs):
        order = random.Random(f"{job.config.seed} {phase} {epoch}").sample(range(items), items)
        for number, part in enumerate(_cut(order, each_epoch), start=epoch * each_epoch):
            drawn = random.Random(f"{job.config.seed} rehearse {number}").sample(range(known), min(known, _REHEARSED))
            last = number + 1 == epochs * each_epoch
            yield Step(phase, number, epoch, last, tuple(part), tuple(sorted(drawn)))


def _cut(items: Sequence[int], parts: int) -> list[Sequence[int]]:
    edges = [round(i * len(items) / parts) for i in range(parts + 1)]
    return [items[a:b] for a, b in pairwise(edges)]
