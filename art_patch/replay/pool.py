"""The app's processes while a stage repeats runs: those that have nothing to do wait for the next of the same function.

A process knows one function, so those of another end when one has to begin. A function that cannot be had is not tried
a second time. Threads may share this.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Any

from art_patch.grouping import Replay, ReplayConfig
from art_patch.replay.process import AppProcess, RunLost
from art_patch.types import TrajectoryInfo


class AppProcesses:
    """See the module."""

    def __init__(self, config: ReplayConfig) -> None:
        """Start none yet."""
        self._config = config
        self._lock = Lock()
        self._free: list[AppProcess] = []
        self._all: list[AppProcess] = []
        self._broken: dict[tuple[str, bool], str] = {}
        self._stopped = False

    def take(self, target: str, *, redacted: bool) -> AppProcess:
        """Return a process that knows the function.

        Raises:
            RunLost: if the function cannot be had.
        """
        with self._lock:
            same = (target, redacted)
            others = [process for process in self._free if (process.target, process.redacted) != same]
            mine = [process for process in self._free if (process.target, process.redacted) == same]
            process = mine.pop() if mine else None
            self._free = mine
        for other in others:
            other.end()
        if process is not None and process.usable:
            return process
        if self._stopped or same in self._broken:
            raise RunLost(self._broken.get(same, "the cycle was stopped"))
        try:
            return self._started(target, redacted)
        except RunLost as error:
            self._broken[same] = str(error)
            raise

    def give_back(self, process: AppProcess) -> None:
        """Let the process wait for the next run."""
        with self._lock:
            self._free.append(process)

    def stop(self) -> None:
        """Begin nothing more, and end what goes on now."""
        self._stopped = True
        for process in list(self._all):
            process.kill()

    def end(self) -> None:
        """Let the processes that wait end."""
        for process in self._free:
            process.end()
        self._free.clear()

    def _started(self, target: str, redacted: bool) -> AppProcess:
        process = AppProcess(target, self._config, redacted=redacted)
        self._all.append(process)
        if self._stopped:
            process.kill()
        try:
            word = process.ask(None, self._config.timeout_s)
        except RunLost:
            process.kill()
            raise
        if "error" in word:
            process.end()
            raise RunLost(str(word["error"]))
        return process


def question_of(one: Replay, info: TrajectoryInfo) -> Mapping[str, Any]:
    """Return what a process is asked: to repeat a run under this trajectory."""
    about = {name: getattr(info, name) for name in ("id", "name", "session_id", "user_id", "tags", "metadata")}
    about |= {"scenario": info.scenario_key}
    return {"trajectory": about, "group": info.group_key, "args": one.args, "kwargs": one.kwargs}
