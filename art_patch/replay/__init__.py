"""Repeats runs of the app's `replayable` functions: `processes` keeps a pool of processes that execute `worker`."""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.replay.processes import AppProcesses, RunLost, question_of
else:
    __getattr__ = lazily()
