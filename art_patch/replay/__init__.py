"""Runs the app's own `replayable` functions again, in processes of the app.

`processes` is the job's side: it starts such processes, asks them and keeps idle ones. `worker` is their program.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
    from art_patch.replay.processes import AppProcesses, RunLost, question_of
else:
    __getattr__ = lazily(__name__, {"processes": "AppProcesses RunLost question_of"})
