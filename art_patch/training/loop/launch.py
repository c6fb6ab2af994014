"""Processes that make one update on this machine: started, heard, and never left behind.

They find each other through a file that only this user can reach, and talk over the loopback interface: nothing of an
update listens to a network. They tell what goes on as lines of JSON on their output, which this process passes on. They
hold the other end of a pipe, and end when it closes: so they do not outlive this process, however it ended. If one of
them dies, the others are ended.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

import torch

from art_patch._lib.process import Child, when_parent_ends
from art_patch.errors import ArtPatchError, ConfigError, TrainingError
from art_patch.training.loop.notes import Progress
from art_patch.training.loop.ranks import RENDEZVOUS

_MARK = "art_patch.training: "
_KEPT_LINES = 20
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def launch(directory: Path, processes: int, progress: Progress) -> None:
    """Run the update of a job directory to its end.

    Args:
        directory: of a job that was claimed.
        processes: how many.
        progress: told what the first of them tells.

    Raises:
        TrainingError: the update failed, or a process died.
        ConfigError: this machine cannot do as the job's config says.
    """
    started: list[Child] = []
    with TemporaryDirectory(prefix="rendezvous-", dir=directory) as private:
        try:
            for rank in range(processes):
                started.append(_start(directory, rank, _environment(processes, Path(private) / "store")))
            _listen(started, progress)
        finally:
            _end(started)


def _environment(processes: int, rendezvous: Path) -> dict[str, str]:
    """What all of them are told; what a user has set about interfaces and threads holds."""
    defaults = {"GLOO_SOCKET_IFNAME": _LOOPBACK, "NCCL_SOCKET_IFNAME": _LOOPBACK}
    if processes > 1:
        defaults["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // processes))
    return {**defaults, **os.environ, "WORLD_SIZE": str(processes), RENDEZVOUS: str(rendezvous)}


def _start(directory: Path, rank: int, environment: dict[str, str]) -> Child:
    command = [sys.executable, "-m", "art_patch.training", str(directory)]
    return Child(command, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.STDOUT)


def _listen(started: list[Child], progress: Progress) -> None:
    """Pass on what they tell until all have ended well; raise what the first to fail tells, or says last."""
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
    """Queue the lines of one of them, and `None` after the last."""
    if process.stdout is not None:
        with process.stdout as output:
            for line in output:
                heard.put((rank, line))
    heard.put((rank, None))


def _pass_on(told: dict[str, Any], progress: Progress) -> None:
    if "error" in told:
        raise _KINDS.get(told["error"], TrainingError)(told["message"])
    progress(told["done"], told["total"], told["note"])


_KINDS: dict[str, type[ArtPatchError]] = {kind.__name__: kind for kind in (ConfigError, TrainingError)}


def _require_success(code: int, tail: deque[str]) -> None:
    if code != 0:
        said = "\n".join(tail)
        raise TrainingError(
            f"a training process ended with {code}; the next cycle goes on from its last checkpoint. If the machine "
            f"ran out of memory, lower micro_batch_tokens or processes. It said last:\n{said}"
        )


def _end(started: list[Child]) -> None:
    """See to it that none of them is left. All they write is published by rename, so none needs time to tidy up."""
    for process in started:
        process.kill()  # all before the first wait: they wait for each other
    for process in started:
        process.wait()
        if process.stdin is not None:  # its standard output is closed by the thread that reads it
            process.stdin.close()


# in the processes that were started


def tell(done: int, total: int, note: str) -> None:
    """Tell the process that started this one how far the update is."""
    _say({"done": done, "total": total, "note": note})


def tell_error(error: ArtPatchError) -> None:
    """Tell it why there will be no policy."""
    _say({"error": type(error).__name__, "message": str(error)})


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write(f"{_MARK}{json.dumps(what)}\n")
    sys.stdout.flush()


def end_with_parent() -> None:
    """End this process when `launch` has ended, if that started it: then nobody holds our input open."""
    if RENDEZVOUS in os.environ:
        when_parent_ends(lambda: os._exit(1))
