"""A job to the optimizer steps it takes, in order. Pure: the same job has the same plan, so a place in it is a number.

There are three phases: demonstrations are imitated, then pairs are told apart, then groups are ranked. Each phase goes
through its items in an order drawn from seed and epoch alone, cut into steps. Each step on groups rehearses some
earlier answers as well, drawn from seed and step alone.
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

# Rehearsed rows a step: as many as a group has siblings, so that they cost about as much as one group more.
_REHEARSED = 8


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step of the plan.

    Attributes:
        phase: The phase that the step belongs to.
        number: Number of the step within its phase, from 0.
        epoch: Number of the pass over the phase's items, from 0.
        last: Whether the step ends its phase.
        items: Indices of the demonstrations, pairs or lessons that the step learns from.
        rehearsed: Indices into the job's `rehearsed` rows, which the step imitates as well.
    """

    phase: PhaseName
    number: int
    epoch: int
    last: bool
    items: tuple[int, ...]
    rehearsed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Lesson:
    """A group whose siblings did not all do equally well, as the loss takes it.

    Attributes:
        examples: The examples that are computed: those with an advantage, and all if there is a KL term.
        on_policy: For each of them, whether the policy that the update starts from sampled it.
        tokens: Number of tokens that all siblings sampled.
        trajectories: Number of siblings that sampled any.
    """

    examples: tuple[Example, ...]
    on_policy: tuple[bool, ...]
    tokens: int
    trajectories: int


def lessons_of(job: TrainJob) -> tuple[Lesson, ...]:
    """Returns the lessons of the groups that are trained on; a group that teaches nothing gives none."""
    return _lessons(job.groups, job)


def evaluated_of(job: TrainJob) -> tuple[Lesson, ...]:
    """Returns the lessons that the policy is evaluated on; none unless the config says so."""
    return () if job.config.eval_steps is None else _lessons(job.evaluation, job)


def _lessons(groups: Sequence[TrainGroup], job: TrainJob) -> tuple[Lesson, ...]:
    # A sibling with advantage 0 has no gradient, but the KL term holds it near the reference too.
    everyone = bool(job.config.loss.kl_coefficient)
    return tuple(_lesson(group, everyone) for group in groups if group.teaches)


def _lesson(group: TrainGroup, everyone: bool) -> Lesson:
    there = [each for each in group.siblings if each.example.rows]
    computed = [each for each in there if everyone or each.example.advantage != 0.0]
    return Lesson(
        examples=tuple(each.example for each in computed),
        on_policy=tuple(each.on_policy for each in computed),
        # Of all siblings, computed or not: the loss is a mean over the group.
        tokens=sum(each.example.sampled for each in there),
        trajectories=len(there),
    )


def plan_of(job: TrainJob) -> tuple[Step, ...]:
    """Returns the steps of an update; none if there is nothing to learn."""
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
    known = len(job.rehearsed) if phase == "groups" else 0
    for epoch in range(config.epochs):
        # An item is a whole group: siblings share what they begin with, and a step's normalisers count all of them.
        order = random.Random(f"{config.seed} {phase} {epoch}").sample(range(items), items)
        for number, part in enumerate(_cut(order, each_epoch), start=epoch * each_epoch):
            # From seed and number alone, not from a running generator: a step after a kill draws the same rows.
            drawn = random.Random(f"{config.seed} rehearse {number}").sample(range(known), min(known, _REHEARSED))
            last = number + 1 == config.epochs * each_epoch
            yield Step(phase, number, epoch, last, tuple(part), tuple(sorted(drawn)))


def _cut(items: Sequence[int], parts: int) -> list[Sequence[int]]:
    edges = [round(i * len(items) / parts) for i in range(parts + 1)]
    return [items[a:b] for a, b in pairwise(edges)]
