"""Updates, one after another, in a process of their own: `python -m art_patch.rollouts.trainer_process`.

The process stays between updates, because importing torch takes longer than a small update. A request is a line on
standard input, `{"groups": [ids], "evaluation": [ids], "config": {...}, "who": ...}`. The answers are lines on standard
output: any number of `{"progress": [done, total, note]}`, then `{"done": {...}}` or `{"failed": {"type", "message"}}`.
When standard input ends, the process ends at once. `ART_PATCH_*` variables name the project.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TextIO

from art_patch.errors import ArtPatchError, EngineError
from art_patch.pipeline import ExplicitUpdate, run_explicit_update
from art_patch.serving import EngineClient
from art_patch.settings import Settings, load_settings
from art_patch.store import open_store
from art_patch.training import LossConfig, TrainConfig


def main() -> None:
    """Answer requests until standard input ends; never returns."""
    # Answers keep the real standard output. Everything that libraries print goes to stderr, not between our lines.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    settings, requests = load_settings(), _requests()
    while True:
        request = requests.get()
        try:
            _answer(answers, {"done": asdict(_update(settings, request, answers))})
        # Any other exception ends this process, and the script is shown the end of its log.
        except ArtPatchError as error:
            _answer(answers, {"failed": {"type": type(error).__name__, "message": str(error)}})
        _give_back_memory()


def _requests() -> queue.SimpleQueue[dict[str, Any]]:
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            waiting.put(json.loads(line))
        # `sys.exit` would end this thread alone. An update may be killed at any moment: nothing is published before it
        # is whole.
        os._exit(0)

    threading.Thread(target=read, name="art-patch-requests", daemon=True).start()
    return waiting


def _update(settings: Settings, request: Mapping[str, Any], answers: TextIO) -> ExplicitUpdate:
    def progress(stage: str, done: int, total: int, note: str = "") -> None:
        _answer(answers, {"progress": [done, total, note]})

    given = request["config"]
    # `asdict` made dictionaries of both; only the outer one becomes a record again by itself.
    config = TrainConfig(**given | {"loss": LossConfig(**given["loss"])})
    store = open_store(settings.store_url, create=False, project=settings.project)
    try:
        engine = EngineClient.of_route(settings, store.ledger.route())
        if engine is None:
            raise EngineError("no engine serves this project; start `art-patch serve --base MODEL`")
        with engine:
            return run_explicit_update(
                store, engine, settings.adapters, config, request["groups"], evaluation=request["evaluation"],
                who=request["who"], progress=progress,
            )  # fmt: skip
    finally:
        store.close()


def _answer(answers: TextIO, message: Mapping[str, Any]) -> None:
    answers.write(json.dumps(message, default=str) + "\n")


def _give_back_memory() -> None:
    # The engine may share the GPU, and torch keeps freed memory for itself.
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
