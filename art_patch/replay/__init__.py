"""Running the app's own `replayable` functions again, in processes of the app.

`pool` keeps the processes, `process` is the job's side of one, `worker` is the program that runs in it.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
    from art_patch.replay.pool import AppProcesses, question_of
    from art_patch.replay.process import RunLost
else:
    __getattr__ = lazily(
        __name__,
        {
            "pool": "AppProcesses question_of",
            "process": "RunLost",
        },
    )
