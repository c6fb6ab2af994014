"""Running the app's own `replayable` functions again, in processes of the app.

`pool` keeps the processes, `process` is the job's side of one, `worker` is the program that runs in it.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
    from art_patch.replay.processes import AppProcesses, RunLost, question_of
else:
    __getattr__ = lazily(
        __name__,
        {
            "processes": "AppProcesses RunLost question_of",
        },
    )
