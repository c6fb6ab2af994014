"""Runs the app's own `replayable` functions again, in separate processes that load the app's code.

`processes` is the job's side: it starts such processes, sends them runs to repeat, and keeps idle ones for the next
run. `worker` is the program that these processes execute.
"""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.replay.processes import AppProcesses, RunLost, question_of
else:
    __getattr__ = lazily()
