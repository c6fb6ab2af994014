"""Processes of the app that run its `replayable` functions again, and a pool of idle ones.

One line of JSON asks a process (`art_patch.replay.worker`), one line answers. Whatever the app does to its process
stays there. A process that takes too long is killed with everything it started, and its run is lost.

A process knows one function. A function that cannot be loaded is not tried a second time. Threads may share a pool.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from threading import Lock, Timer
from typing import Any

from art_patch._lib.process import Child
from art_patch.grouping import Replay, ReplayConfig
from art_patch.types import TrajectoryInfo

_END_S = 10.0
"""How long a process may take to end by itself once it has nothing more to do."""


class RunLost(Exception):
    """The process ended, or was killed, before it answered."""


class AppProcess:
    """One process, which knows one function."""

    def __init__(self, target: str, config: ReplayConfig, *, redacted: bool = False) -> None:
        """Start it where we were started, in a process group of its own.

        With `redacted` it repeats nothing unless what it records is redacted.

        Raises:
            RunLost: if there is no such interpreter.
        """
        self.target = target
        self.redacted = redacted
        self._late = False
        self._gone = False
        settings = {f"ART_PATCH_{name.upper()}": value for name, value in config.environment.items()}
        command = [config.python or sys.executable, "-m", "art_patch.replay.worker", target]
        command += ["redacted"] if redacted else []
        try:
            self._process = Child(command, {**os.environ, **settings}, errors="strict")
        except OSError as error:
            raise RunLost(f"{command[0]} cannot be started ({error.strerror})") from None

    @property
    def usable(self) -> bool:
        """Whether it can be asked."""
        return not (self._late or self._gone) and self._process.poll() is None

    def ask(self, question: Mapping[str, Any] | None, timeout_s: float) -> Mapping[str, Any]:
        """Return the answer, or with `None` the word with which it begins.

        Raises:
            RunLost: if it ended or took too long.
        """
        # A read from a pipe has no time-out: at the deadline the timer kills the group, and the read ends with the
        # pipe.
        timer = Timer(timeout_s, self._overdue)
        timer.start()
        try:
            if question is not None:
                assert self._process.stdin is not None
                self._process.stdin.write(json.dumps(question) + "\n")
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
        except (OSError, ValueError):  # a pipe without anybody at the other end, or one that `kill` has closed
            line = ""
        finally:
            timer.cancel()
            timer.join()
        if not line.endswith("\n"):
            raise RunLost(f"took longer than {timeout_s:g} s" if self._late else f"the process ended{self._how()}")
        return json.loads(line)

    def end(self) -> None:
        """Close its input, so that it ends by itself; kill it if it does not."""
        with suppress(OSError, subprocess.TimeoutExpired):
            if self.usable:
                self._process.communicate(timeout=_END_S)
        self.kill()

    def kill(self) -> None:
        """End it now, and what it has started."""
        if self._gone:
            return  # its number may be another's by now
        self._gone = True
        self._process.kill_group()
        self._process.wait()
        self._process.close_pipes()

    def _overdue(self) -> None:
        self._late = True
        self._process.kill_group()

    def _how(self) -> str:
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return ""
        return f" with exit code {code}" if code >= 0 else f" by signal {-code}"


class AppProcesses:
    """The pool: idle processes wait for the next run of the same function."""

    def __init__(self, config: ReplayConfig) -> None:
        """Prepare; `take` starts processes when they are needed."""
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
        # After the lock: ending may take seconds, and other threads give their processes back meanwhile.
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
        """Start no more processes, and kill those that run."""
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
        if self._stopped:  # `stop` may have gone through the list just before this one was in it
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
