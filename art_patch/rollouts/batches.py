"""Batches for a training loop: of a data set's items, and of groups of rollouts that are gathered ahead.

Names, arguments and order are those of OpenPipe ART.
"""

import asyncio
import math
import random
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable, Iterator, Sequence
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from art_patch.errors import ConfigError
from art_patch.rollouts.at_once import bar, gathering, run_all
from art_patch.rollouts.trajectory_group import PendingGroup, TrajectoryGroup, rollouts_of

T = TypeVar("T")
_Task = asyncio.Task[list[TrajectoryGroup | BaseException]]


@dataclass(frozen=True, slots=True)
class DatasetBatch(Generic[T]):
    """The items of one training step."""

    items: list[T]
    step: int  # over all epochs, from 0
    epoch: int  # from 0
    epoch_step: int  # within the epoch, from 0


def iterate_dataset(
    dataset: Sequence[T],
    groups_per_step: int = 1,
    num_epochs: int = 1,
    initial_step: int = 0,
    use_tqdm: bool = True,
) -> Iterator[DatasetBatch[T]]:
    """Yield the batches of `groups_per_step` items, shuffled in each epoch; the same for the same epoch and size.

    A script that goes on where it stopped gives `initial_step=await model.get_step()`. The last batch of an epoch may
    be smaller. `use_tqdm` shows a bar on stderr. Raises `ConfigError` if `groups_per_step` is below 1.
    """
    if groups_per_step < 1:
        raise ConfigError(f"groups_per_step={groups_per_step} must be at least 1, or there would be no end of steps")
    steps = math.ceil(len(dataset) / groups_per_step)
    with bar("steps" if use_tqdm else None, steps * num_epochs) as shown:
        for step in range(initial_step, steps * num_epochs):
            epoch, epoch_step = divmod(step, steps)
            order = list(range(len(dataset)))
            random.Random(epoch).shuffle(order)  # of its own: the script's random numbers stay as they are
            begin = epoch_step * groups_per_step
            yield DatasetBatch([dataset[at] for at in order[begin : begin + groups_per_step]], step, epoch, epoch_step)
            shown(completed=step + 1)


async def trajectory_group_batches(
    groups: Iterable[Awaitable[TrajectoryGroup]],
    *,
    batch_size: int,
    max_batch_exceptions: float = 0,
    max_concurrent_batches: int = 4,
    skip_batches: int = 0,
    pbar_desc: str | None = "batches",
) -> AsyncIterator[list[TrajectoryGroup]]:
    """Yield batches of groups in the order in which they become complete; rollouts of later batches run meanwhile.

    Args:
        groups: `TrajectoryGroup(rollout(...) for ...)`, or coroutines that each return a group.
        batch_size: groups in a batch; the last one may be smaller.
        max_batch_exceptions: rollouts that may raise, in all, before the exception of one more is raised here.
        max_concurrent_batches: batches whose rollouts run at the same time, the one that is waited for included.
        skip_batches: batches at the beginning that are left out, for a script that goes on where it stopped.
        pbar_desc: text beside the progress bar, which counts groups; `None` shows no bar.
    """
    for name, value in (("batch_size", batch_size), ("max_concurrent_batches", max_concurrent_batches)):
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
    every = list(groups)
    unstarted = every[batch_size * skip_batches :]
    waiting, batch = iter(unstarted), list[TrajectoryGroup]()
    running, done = set[_Task](), set[_Task]()
    # Of its own: while a batch is out, what the script gathers is counted by itself. And the event loop may end this
    # generator in another context than the one that began it.
    context, stack = copy_context(), ExitStack()
    context.run(stack.enter_context, gathering(None, rollouts_of(unstarted), max_batch_exceptions, None))
    shown = stack.enter_context(bar(pbar_desc, len(unstarted)))
    try:
        while True:
            # Groups that are complete are part of a batch that nobody has taken yet, so they count.
            for group in islice(waiting, max(batch_size * max_concurrent_batches - len(running) - len(batch), 0)):
                running.add(asyncio.get_running_loop().create_task(run_all([group]), context=context))
            if not running:
                break
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            batch += [found for task in done for found in task.result() if isinstance(found, TrajectoryGroup)]
            shown(advance=len(done))
            while len(batch) >= batch_size:
                ready, batch = batch[:batch_size], batch[batch_size:]
                yield ready
        if batch:
            yield batch
    finally:
        context.run(stack.close)  # first: what is awaited below may be cancelled
        for task in running:
            task.cancel()
        try:
            # Those that are done as well: of several that raised at once, the first was raised to the script.
            await asyncio.gather(*running, *done, return_exceptions=True)
        finally:
            for group in every:  # those that were left out, too; closing one that has run does nothing
                if isinstance(group, PendingGroup | Coroutine):
                    group.close()
