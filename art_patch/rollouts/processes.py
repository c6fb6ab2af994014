"""Child processes of a training script, which exchange JSON lines with it and end with it; one of them is the trainer.

The script holds the write end of each child's standard input. When the script ends, for whatever reason, that pipe
closes, and the child then ends itself. Started as a module, this file is such a child:

- `python -m art_patch.rollouts.processes serve ...` does what `art-patch serve ...` does.
- `python -m art_patch.rollouts.processes` is the trainer, which makes one update after another. It keeps running
  between updates, because importing torch takes longer than a small update. `ART_PATCH_*` variables name the project. A
  request is one line on standard input, `{"groups": [ids], "evaluation": [ids], "config": {...}, "who": ...}`. Answers
  on stdout: any number of `{"progress": [done, total, note]}`, then `{"done": {...}}` or `{"failed": {type, message}}`.
"""

import asyncio
import gc
import json
import os
import queue
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO, cast

from art_patch import errors, pipeline, serving, settings, store
from art_patch._lib import process
from art_patch.training import LossConfig, TrainConfig

SELF = "art_patch.rollouts.processes"
"""The name of this module for `ScriptChild`; `__name__` would be `__main__` in a child."""

Progress = Callable[[int, int, str], None]
"""Called from another thread, with the number of finished optimizer steps, their total number, and a note."""


class ScriptChild(process.Child):
    """A child process that runs a Python module and exchanges JSON objects with the script, one in each line."""

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start the child with `environment` added to this process's own; its stderr is appended to `log`."""
        # -P: files beside the script must not stand in for modules of the same name
        command = [sys.executable, "-P", "-m", module, *arguments]
        super().__init__(command, {**os.environ, **environment}, log=log)

    def send(self, message: Mapping[str, Any]) -> None:
        """Write a JSON object to the child's standard input; raises an `OSError` if the child has ended."""
        assert self.stdin is not None
        self.stdin.write(json.dumps(message) + "\n")

    def read(self) -> dict[str, Any] | None:
        """Wait for the child's next JSON object and return it; `None` if the child has ended or closed its output."""
        assert self.stdout is not None
        with suppress(ValueError):  # `stop` closed our side of the pipe
            for line in self.stdout:
                with suppress(ValueError):  # a library of the child printed something else
                    found: Any = json.loads(line)
                    if isinstance(found, dict):
                        return cast("dict[str, Any]", found)
        return None


class Trainer:
    """A project's trainer process, kept from the first update on; an update that is cancelled ends the process."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self._environment, self._log = environment, log
        self._child: ScriptChild | None = None
        self._one = threading.Lock()

    async def update(
        self, what: Mapping[str, Sequence[str]], config: TrainConfig, *, who: str, progress: Progress
    ) -> dict[str, Any]:
        """Train and return the update's record; its errors, or `TrainingError` for a dead process.

        `what` has ids of `groups` in the store to learn from, and of groups for the `evaluation`; or training `files`.
        """
        request = {**what, "config": asdict(config), "who": who}
        try:
            return await asyncio.to_thread(self._update, request, progress)
        except asyncio.CancelledError:
            # A thread cannot be cancelled. Without its process, `read` there returns and the thread ends.
            self.close()
            raise

    def _update(self, request: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        # A second update waits here, in its own thread, for the end of the first.
        with self._one:
            if self._child is None or self._child.poll() is not None:
                self._child = ScriptChild(SELF, (), self._environment, self._log)
            child = self._child
            with suppress(OSError):  # the process has ended, which `read` tells, too
                child.send(request)
            while (answer := child.read()) is not None:
                if "done" in answer:
                    return answer["done"]
                if "failed" in answer:
                    failed = answer["failed"]
                    raise getattr(errors, failed["type"], errors.TrainingError)(failed["message"])
                progress(*answer["progress"])
            child.stop()
            said = child.last_words()
            raise errors.TrainingError(f"the trainer's process ended; nothing was published. {self._log} says: {said}")

    def close(self) -> None:
        """End the trainer's process; an update that is running is lost."""
        child, self._child = self._child, None
        if child is not None:
            # An update under way would not end within any grace, and may be killed at any moment.
            child.stop(0.0 if self._one.locked() else 5.0)


# The functions below run in the trainer's process.


def _answer_requests() -> None:
    """Answer requests until standard input ends; never returns."""
    # Answers keep the real standard output. Everything that libraries print goes to stderr, not between our lines.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    project, requests = settings.load_settings(), _requests()
    while True:
        request = requests.get()
        try:
            _answer(answers, {"done": _updated(project, request, answers)})
        # Any other exception ends this process, and the script is shown the end of its log.
        except errors.ArtPatchError as error:
            _answer(answers, {"failed": {"type": type(error).__name__, "message": str(error)}})
        # The engine may share the GPU, and torch keeps freed memory for itself.
        gc.collect()
        if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()


def _requests() -> queue.SimpleQueue[dict[str, Any]]:
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            waiting.put(json.loads(line))
        # `sys.exit` would end this thread alone. An update may be killed: nothing is published before it is whole.
        os._exit(0)

    threading.Thread(target=read, name="art-patch-requests", daemon=True).start()
    return waiting


def _updated(project: settings.Settings, request: Mapping[str, Any], answers: TextIO) -> dict[str, Any]:
    def progress(stage: str, done: int, total: int, note: str = "") -> None:
        _answer(answers, {"progress": [done, total, note]})

    given = request["config"]
    # `asdict` made dictionaries of both; only the outer one becomes a record again by itself.
    config = TrainConfig(**given | {"loss": LossConfig(**given["loss"])})
    with closing(store.open_store(project.store_url, create=False, project=project.project)) as opened:
        engine = serving.EngineClient.of_route(project, opened.ledger.route())
        if engine is None:
            raise errors.EngineError("no engine serves this project; start `art-patch serve --base MODEL`")
        about: Any = {"who": request["who"], "progress": progress}
        with engine:
            if files := request.get("files"):
                return asdict(pipeline.run_file_update(opened, engine, project.adapters, config, files, **about))
            return asdict(pipeline.run_explicit_update(
                opened, engine, project.adapters, config, request["groups"], evaluation=request["evaluation"], **about
            ))  # fmt: skip


def _answer(answers: TextIO, message: Mapping[str, Any]) -> None:
    answers.write(json.dumps(message, default=str) + "\n")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        _answer_requests()
    process.when_parent_ends(lambda: os.kill(os.getpid(), signal.SIGTERM))
    runpy.run_module("art_patch", run_name="__main__")
