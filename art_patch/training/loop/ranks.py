"""The processes of one update: who computes what, and how their parts become one.

Each holds the whole model and takes the same steps. The packs of a step are dealt out, gradients are summed, so all
hold the same weights after it; the first alone writes files.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from art_patch.training.data.packing import Example, Pack, packs_of

RENDEZVOUS = "ART_PATCH_RENDEZVOUS"
"""Variable that names the file through which processes that `launch` started find each other."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Where a process stands among all.

    Attributes:
        rank: its number, from 0.
        size: how many there are.
    """

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the one that writes files."""
        return self.rank == 0

    def shard(self, examples: Sequence[Example], max_tokens: int) -> list[Pack]:
        """Return this process's packs of the examples, so that each process computes about as many tokens.

        Args:
            examples: of all processes.
            max_tokens: distinct tokens a pack may compute.
        """
        packs = packs_of(examples, max_tokens)
        if len(packs) < self.size:  # what packs share is computed twice then, which is still sooner than idle
            packs = packs_of(examples, -(-sum(pack.tokens for pack in packs) // self.size))
        load = [0] * self.size
        mine: list[Pack] = []
        for pack in sorted(packs, key=lambda pack: -pack.tokens):
            least = load.index(min(load))
            load[least] += pack.tokens
            if least == self.rank:
                mine.append(pack)
        return sorted(mine, key=lambda pack: int(pack.examples_E[0]))

    def sum_gradients(self, weights: Iterable[Tensor]) -> None:
        """Give every weight the sum of all processes' gradients; where none has one it is 0."""
        weights = list(weights)
        grads = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
        if self.size > 1:
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            dist.all_reduce(flat)
            parts = flat.split([grad.numel() for grad in grads])
            grads = [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)]
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of all processes' values."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """Return the largest of all processes' values."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        if self.size == 1:
            return values
        values = values.clone()
        dist.all_reduce(values, how)
        return values


ALONE = Ranks()


@contextmanager
def joined() -> Generator[Ranks]:
    """Stand among the processes that `launch` has started, or a user's torchrun; alone if there are no others.

    Those of `launch` meet through its file, those of torchrun where its environment says (`MASTER_ADDR`).
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    rank, path = int(os.environ["RANK"]), os.environ.get(RENDEZVOUS)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store = None if path is None else dist.FileStore(path, size)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=size)
    yield Ranks(rank, size)
    dist.destroy_process_group()  # not after an error: the others would fail too, and might be taken for its cause
