"""Processes that make one update: started by torchrun, heard, and never left behind.

They tell what goes on as lines of JSON on their output, which this process passes on. They hold the other end of a
pipe, and end when it closes: so they do not outlive this process, however it ended. If one of them dies, torchrun ends
the others.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from art_patch.errors import ArtPatchError, ConfigError, TrainingError
from art_patch.training.notes import Progress

_MARK = "art_patch.training: "
_KEPT_LINES = 20
_END_S = 10.0


def launch(directory: Path, processes: int, progress: Progress) -> None:
    """Run the update of a job directory to its end.

    Args:
        directory: of a job that was claimed.
        processes: how many.
        progress: told what the first of them tells.

    Raises:
        TrainingError: the update failed, or a process died.
    """
    module = ["-m", "art_patch.training", str(directory)]
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    process = subprocess.Popen(
        [sys.executable, *(several if processes > 1 else []), *module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C comes to us alone, and we end them
    )
    try:
        failure, tail = _listen(process.stdout, progress)
        code = process.wait()
    finally:
        _end(process)
    if failure is not None:
        raise failure
    if code != 0:
        said = "\n".join(tail)
        raise TrainingError(
            f"a training process ended with {code}; the next cycle goes on from its last checkpoint. If the machine "
            f"ran out of memory, lower micro_batch_tokens or processes. It said last:\n{said}"
        )


def _listen(output: IO[str] | None, progress: Progress) -> tuple[ArtPatchError | None, deque[str]]:
    """Pass on what the processes tell until all have closed their output; return an error they told of."""
    failure: ArtPatchError | None = None
    tail: deque[str] = deque(maxlen=_KEPT_LINES)
    for line in output or ():
        if not line.startswith(_MARK):
            tail.append(line.rstrip())
            continue
        told: dict[str, Any] = json.loads(line.removeprefix(_MARK))
        if "error" in told:
            failure = failure or _KINDS.get(told["error"], TrainingError)(told["message"])
        else:
            progress(told["done"], told["total"], told["note"])
    return failure, tail


_KINDS: dict[str, type[ArtPatchError]] = {kind.__name__: kind for kind in (ConfigError, TrainingError)}


def _end(process: subprocess.Popen[str]) -> None:
    """See to it that none of them is left: the closed pipe ends those that a signal does not reach."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


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
    """End this process when the one that started it has ended: then nobody writes to our input, and it closes."""

    def watch() -> None:
        with suppress(OSError):
            while os.read(0, 1):
                pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="art-patch-parent-watch").start()
