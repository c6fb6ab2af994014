"""The processes of one update on this machine: how they start, and how their parts become one result.

Each process (rank) holds the whole model and takes the same steps. The packs of a step are dealt out and the gradients
summed, so all hold the same weights after it. The first process alone writes files.

The processes find each other through a file that only this user can reach, and talk over the loopback interface:
nothing of an update listens to a network. They report progress as lines of JSON on their output. They hold the other
end of a pipe and end when it closes, so they do not outlive the process that launched them, however it ended. If one of
them dies, the others are ended.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from art_patch._lib.process import Child, when_parent_ends
from art_patch.errors import ArtPatchError, ConfigError, TrainingError
from art_patch.training.data.packing import Example, Pack, packs_of

Progress = Callable[[int, int, str], None]  # called with optimizer steps done, their total, and a note for people

_RENDEZVOUS = "ART_PATCH_RENDEZVOUS"  # variable with the path through which processes that `launch` started meet
_MARK = "art_patch.training: "  # tells our lines from those of libraries
_KEPT_LINES = 20
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def silently(done: int, total: int, note: str) -> None:
    """Ignores progress."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """A process's place among those of an update: its number `rank`, from 0, and their number `size`."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files."""
        return self.rank == 0

    def shard(self, examples: Sequence[Example], max_tokens: int) -> list[Pack]:
        """Returns this process's packs of the examples, so that each process computes about as many tokens.

        A pack computes at most `max_tokens` distinct tokens.
        """
        packs = packs_of(examples, max_tokens)
        if len(packs) < self.size:
            # Cut smaller: the beginnings that packs share are computed twice then, which is still sooner than idle.
            packs = packs_of(examples, -(-sum(pack.tokens for pack in packs) // self.size))
        # Largest first, each to the process with the least to do. All processes compute the same deal.
        load = [0] * self.size
        mine: list[Pack] = []
        for pack in sorted(packs, key=lambda pack: -pack.tokens):
            least = load.index(min(load))
            load[least] += pack.tokens
            if least == self.rank:
                mine.append(pack)
        return sorted(mine, key=lambda pack: int(pack.examples_E[0]))

    def sum_gradients(self, weights: Iterable[Tensor]) -> None:
        """Gives every weight the sum of all processes' gradients, and 0 if no process has one."""
        weights = list(weights)
        # A process without a pack has no gradients, and still has to take part in the sum.
        grads = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
        if self.size > 1:
            flat = torch.cat([grad.reshape(-1) for grad in grads])  # one transfer rather than one for each weight
            dist.all_reduce(flat)
            parts = flat.split([grad.numel() for grad in grads])
            grads = [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)]
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum of all processes' values."""
        if self.size == 1:
            return values
        values = values.clone()
        dist.all_reduce(values)
        return values

    def sum_each(self, sums: Mapping[str, float], device: torch.device) -> dict[str, float]:
        """Returns each number summed over all processes, by way of `device`."""
        # fp64: counts of tokens stay whole.
        values = torch.tensor(list(sums.values()), dtype=torch.float64, device=device)
        return dict(zip(sums, self.sum(values).tolist(), strict=True))


ALONE = Ranks()


@contextmanager
def joined() -> Generator[Ranks]:
    """Joins the processes that `launch` or a user's torchrun started, and leaves them at the end of the block.

    Processes of `launch` meet through its file, those of torchrun where its environment says (`MASTER_ADDR`).
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    rank, path = int(os.environ["RANK"]), os.environ.get(_RENDEZVOUS)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store = None if path is None else dist.FileStore(path, size)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=size)
    yield Ranks(rank, size)
    dist.destroy_process_group()  # not after an error: the others would fail too, and might be taken for its cause


def launch(directory: Path, processes: int, progress: Progress) -> None:
    """Runs the update of a claimed job directory in so many processes, and returns when it is done.

    Raises:
        TrainingError: The update failed, or a process died.
        ConfigError: This machine cannot train as the job's config says.
    """
    started: list[Child] = []
    with TemporaryDirectory(prefix="rendezvous-", dir=directory) as private:
        try:
            for rank in range(processes):
                started.append(_start(directory, rank, _environment(processes, Path(private) / "store")))
            _listen(started, progress)
        finally:
            # All are killed before the first wait: they wait for each other. All they write is published by rename, so
            # none needs time to tidy up.
            for process in started:
                process.kill()
            for process in started:
                process.wait()
                if process.stdin is not None:  # its standard output is closed by the thread that reads it
                    process.stdin.close()


def _environment(processes: int, rendezvous: Path) -> dict[str, str]:
    # Without these Gloo and NCCL choose an interface themselves, and listen to the network. A user's own values hold.
    defaults = {"GLOO_SOCKET_IFNAME": _LOOPBACK, "NCCL_SOCKET_IFNAME": _LOOPBACK}
    if processes > 1:
        defaults["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // processes))
    return {**defaults, **os.environ, "WORLD_SIZE": str(processes), _RENDEZVOUS: str(rendezvous)}


def _start(directory: Path, rank: int, environment: dict[str, str]) -> Child:
    command = [sys.executable, "-m", "art_patch.training", str(directory)]
    return Child(command, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.STDOUT)


def _listen(started: list[Child], progress: Progress) -> None:
    """Passes progress on until all processes have ended well; raises the error of the first process that fails."""
    heard: SimpleQueue[tuple[int, str | None]] = SimpleQueue()
    for rank, process in enumerate(started):
        threading.Thread(target=_hear, args=(rank, process, heard), daemon=True).start()
    tails = [deque[str](maxlen=_KEPT_LINES) for _ in started]
    running = len(started)
    while running:
        rank, line = heard.get()
        if line is None:
            running -= 1
            _require_success(started[rank].wait(), tails[rank])
        elif line.startswith(_MARK):
            _pass_on(json.loads(line.removeprefix(_MARK)), progress)
        else:
            tails[rank].append(line.rstrip())


def _hear(rank: int, process: Child, heard: SimpleQueue[tuple[int, str | None]]) -> None:
    """Queues the lines of one process, and `None` after the last."""
    if process.stdout is not None:
        with process.stdout as output:
            for line in output:
                heard.put((rank, line))
    heard.put((rank, None))


def _pass_on(message: dict[str, Any], progress: Progress) -> None:
    if "error" in message:
        raise _KINDS.get(message["error"], TrainingError)(message["message"])
    progress(message["done"], message["total"], message["note"])


_KINDS: dict[str, type[ArtPatchError]] = {kind.__name__: kind for kind in (ConfigError, TrainingError)}


def _require_success(code: int, tail: deque[str]) -> None:
    if code != 0:
        said = "\n".join(tail)
        raise TrainingError(
            f"a training process ended with {code}; the next cycle goes on from its last checkpoint. If the machine "
            f"ran out of memory, lower micro_batch_tokens or processes. It said last:\n{said}"
        )


# The functions below run in the processes that were started.


def tell(done: int, total: int, note: str) -> None:
    """Reports progress to the process that launched this one."""
    _say({"done": done, "total": total, "note": note})


def tell_error(error: ArtPatchError) -> None:
    """Reports to the process that launched this one why there will be no policy."""
    _say({"error": type(error).__name__, "message": str(error)})


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write(f"{_MARK}{json.dumps(what)}\n")
    sys.stdout.flush()


def end_with_parent() -> None:
    """Lets this process end when the process that launched it has ended, if `launch` started it."""
    if _RENDEZVOUS in os.environ:
        when_parent_ends(lambda: os._exit(1))
