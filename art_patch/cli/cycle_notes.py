"""Notes how `art-patch retrain` begins and ends: in the log, and in a file for metrics."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from art_patch import pipeline, store
from art_patch._lib.events import event
from art_patch.cli import output
from art_patch.errors import ArtPatchError, GateRejected


@contextmanager
def noted(directory: Path) -> Generator[Callable[[dict[str, Any]], None]]:
    """Note how the command ends, for metrics: also if it fails before a cycle begins, such as for want of a store."""
    began, ended, code, outcome = time.monotonic(), dict[str, Any](), 1, ""
    try:
        yield ended.update
        outcome = str(ended["outcome"])
        code = GateRejected.exit_code if outcome == "rejected" else 0
    except BaseException as error:
        code, outcome = _exit_code(error), type(error).__name__
        raise
    finally:
        took_s = time.monotonic() - began
        pipeline.keep_last_retrain(directory, ended_at=time.time(), took_s=took_s, exit_code=code, outcome=outcome)


def _exit_code(error: BaseException) -> int:
    # A command that is stopped has an exit code of its own, and a mistake of ours has 1.
    return output.INTERRUPTED if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)


@contextmanager
def in_log(opened: store.Store, project: str) -> Generator[Callable[[dict[str, Any]], None]]:
    """Write the begin and the end of a cycle, and what it decided, into the log."""
    decisions, began, ended = pipeline.DecisionLog(opened.ledger), time.monotonic(), dict[str, Any]()
    event("cycle", "a cycle of %s begins", project, event="cycle begins", project=project)
    try:
        yield ended.update
        decisions.look()
    except BaseException as error:
        code = _exit_code(error)
        with suppress(ArtPatchError):
            decisions.look()
        facts: dict[str, Any] = {"event": "cycle failed", "error": type(error).__name__, "exit_code": code}
        words = "the cycle failed after %.1f s: %s, exit code %d"
        took_s = round(time.monotonic() - began, 3)
        event("cycle", words, took_s, facts["error"], code, level=logging.ERROR, took_s=took_s, **facts)
        raise
    took_s = round(time.monotonic() - began, 3)
    its: dict[str, Any] = {key: ended.get(key) for key in ("outcome", "candidate", "reason")}
    words = "the cycle ended after %.1f s: %s: %s"
    event("cycle", words, took_s, its["outcome"], its["reason"], event="cycle ended", took_s=took_s, **its)
