"""Starts the processes of one update on this machine, divides the work between them, and adds up their results.

Each process (rank) holds the whole model and makes the same optimizer steps. The packs of a step are divided between
the processes, and their gradients are summed, so all processes have the same weights after the step. Only the first
process writes files.

The processes that `launch` starts find each other through a file that only this user can read, and exchange tensors
over the loopback interface, so none of them listens to a network. They report progress as lines of JSON on their
standard output. Each process reads from a pipe that its launcher holds open, and exits when the pipe closes. So the
processes also end when their launcher is killed. If one of the processes fails, `launch` kills the others.
"""

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

from art_patch._lib.process import Child, when_parent_ends
from art_patch.errors import ArtPatchError, ConfigError, TrainingError
from art_patch.training.data.packing import Pack, packs_of
from art_patch.training.data.rows import Example
from art_patch.training.loop.unsloth import variables_with_ours

Progress = Callable[[int, int, str], None]  # called with optimizer steps done, their total, and a note for people

_RENDEZVOUS = "ART_PATCH_RENDEZVOUS"  # variable with the path through which processes that `launch` started meet
_MARK = "art_patch.training: "  # tells our lines from those of libraries
_KEPT_LINES = 20
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_KINDS: dict[str, type[ArtPatchError]] = {kind.__name__: kind for kind in (ConfigError, TrainingError)}


def silently(done: int, total: int, note: str) -> None:
    """Does nothing; it is the `Progress` function for callers that want no progress reports."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """One process's place among the processes of an update, and the collective operations between them."""

    rank: int = 0  # number of this process, from 0
    size: int = 1  # number of all processes of the update

    @property
    def first(self) -> bool:
        """Whether this is process 0, the only one that writes files."""
        return self.rank == 0

    def shard(self, examples: Sequence[Example], max_tokens: int) -> list[Pack]:
        """Divides examples into packs (inputs of forward passes) and returns those that this process must compute.

        Every process calls this method with the same arguments, and all get about the same number of tokens.
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

    def sum_gradients(self, weights: Iterable[torch.Tensor]) -> None:
        """Replaces the gradient of each weight by the sum over all processes; it becomes 0 if no process has one."""
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

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the elementwise sum of `values` over all processes."""
        if self.size == 1:
            return values
        values = values.clone()
        dist.all_reduce(values)
        return values

    def sum_each(self, sums: Mapping[str, float], device: torch.device) -> dict[str, float]:
        """Returns each number of `sums` added up over all processes; `device` is where the processes exchange it."""
        # fp64: counts of tokens stay whole.
        values = torch.tensor(list(sums.values()), dtype=torch.float64, device=device)
        return dict(zip(sums, self.sum(values).tolist(), strict=True))


ALONE = Ranks()


@contextmanager
def joined() -> Generator[Ranks]:
    """Connects this process to the other processes of its update, and yields its place among them.

    Processes that `launch` started connect through a file, and those of torchrun through the address in `MASTER_ADDR`.
    A process that is the only one of its update connects to none.
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


def launch(directory: Path, processes: int, progress: Progress, *, python: Path | None = None) -> None:
    """Runs the update of a job `directory`, which holds the job's file, in new processes, and returns at its end.

    `python` is the interpreter of another environment that is to run them, with this process's art_patch. Raises
    `TrainingError` if the update failed or a process died, and `ConfigError` if this machine lacks the backend or the
    GPUs that the job's config asks for.
    """
    started: list[Child] = []
    with TemporaryDirectory(prefix="rendezvous-", dir=directory) as private:
        try:
            variables = dict(os.environ) if python is None else variables_with_ours(Path(private))
            environment = _environment(processes, Path(private) / "store", variables)
            # -P: another environment finds our art_patch by those variables, and nothing in the current directory.
            line = [sys.executable] if python is None else [str(python), "-P"]
            for rank in range(processes):
                command = [*line, "-m", "art_patch.training", str(directory)]
                its = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                started.append(Child(command, its, stderr=subprocess.STDOUT))
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


def _environment(processes: int, rendezvous: Path, variables: Mapping[str, str]) -> dict[str, str]:
    # Without these Gloo and NCCL choose an interface themselves, and listen to the network. A user's own values hold.
    defaults = {"GLOO_SOCKET_IFNAME": _LOOPBACK, "NCCL_SOCKET_IFNAME": _LOOPBACK}
    if processes > 1:
        defaults["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // processes))
    return {**defaults, **variables, "WORLD_SIZE": str(processes), _RENDEZVOUS: str(rendezvous)}


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
            if code := started[rank].wait():
                raise TrainingError(
                    f"a training process ended with {code}; the next cycle goes on from its last checkpoint. If the "
                    "machine ran out of memory, lower micro_batch_tokens or processes. It said last:\n"
                    + "\n".join(tails[rank])
                )
        elif line.startswith(_MARK):
            message = json.loads(line.removeprefix(_MARK))
            if "error" in message:
                raise _KINDS.get(message["error"], TrainingError)(message["message"])
            progress(message["done"], message["total"], message["note"])
        else:
            tails[rank].append(line.rstrip())


def _hear(rank: int, process: Child, heard: SimpleQueue[tuple[int, str | None]]) -> None:
    if process.stdout is not None:
        with process.stdout as output:
            for line in output:
                heard.put((rank, line))
    heard.put((rank, None))


# The functions below run in the processes that were started.
def tell(done: int, total: int, note: str) -> None:
    """Reports progress to the process that launched this one, as a line of JSON on standard output."""
    _say({"done": done, "total": total, "note": note})


def tell_error(error: ArtPatchError) -> None:
    """Reports the error that ended the update to the process that launched this one, which raises it again."""
    _say({"error": type(error).__name__, "message": str(error)})


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write(f"{_MARK}{json.dumps(what)}\n")
    sys.stdout.flush()


def end_with_parent() -> None:
    """Makes a process that `launch` started exit when its launcher ends, even if the launcher is killed."""
    if _RENDEZVOUS in os.environ:
        when_parent_ends(lambda: os._exit(1))
