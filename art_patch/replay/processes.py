"""The job's side of a replay: starts processes that load the app's code and run one `replayable` function, in a pool.

A process that exceeds the time limit is killed together with all processes that it started, and its run is lost.
Several threads may use one pool.
"""

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
from art_patch.trajectories import prompt_key
from art_patch.types import TrajectoryInfo

_END_S = 10.0  # a process that is told to end gets this time, for exit handlers of the app


class RunLost(Exception):
    """Raised if a run has no result: its process could not start, or ended or was killed before it answered."""


class AppProcess:
    """One process that has loaded the app's code and runs one of its functions again and again."""

    def __init__(self, target: str, config: ReplayConfig, *, redacted: bool = False) -> None:
        """Start the worker in this working directory; raises `RunLost` if the interpreter cannot be started."""
        self.runs = (target, redacted)
        self._late = self._gone = False
        settings = {f"ART_PATCH_{name.upper()}": value for name, value in config.environment.items()}
        command = [config.python or sys.executable, "-m", "art_patch.replay.worker", target]
        command += ["redacted"] if redacted else []
        try:
            self._process = Child(command, {**os.environ, **settings}, errors="strict")
        except OSError as error:
            raise RunLost(f"{command[0]} cannot be started ({error.strerror})") from None

    @property
    def usable(self) -> bool:
        """Whether the process is alive and can take another run."""
        return not (self._late or self._gone) and self._process.poll() is None

    def ask(self, question: Mapping[str, Any] | None, timeout_s: float) -> Mapping[str, Any]:
        """Send a question, `None` for none, and return the answer; `RunLost` if it ended or exceeds `timeout_s`."""
        # A read from a pipe has no timeout. At the deadline the timer kills the process group; that closes the pipe
        # and ends the read.
        timer = Timer(timeout_s, self._overdue)
        timer.start()
        try:
            assert self._process.stdin is not None and self._process.stdout is not None
            if question is not None:
                self._process.stdin.write(json.dumps(question) + "\n")
            line = self._process.stdout.readline()
        except (OSError, ValueError):  # the other end of the pipe is closed, or `kill` has closed this one
            line = ""
        finally:
            timer.cancel()
            timer.join()
        if not line.endswith("\n"):
            raise RunLost(f"took longer than {timeout_s:g} s" if self._late else f"the process ended{self._how()}")
        return json.loads(line)

    def end(self) -> None:
        """Close the process's standard input, so that it ends by itself; kill it if it does not end."""
        with suppress(OSError, subprocess.TimeoutExpired):
            if self.usable:
                self._process.communicate(timeout=_END_S)
        self.kill()

    def kill(self) -> None:
        """Kill the process and all processes that it started."""
        # Once only: after `wait` the operating system may give the same number to another process.
        if self._gone:
            return
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
    """A pool of app processes. A process that has finished a run stays in the pool until its function runs again."""

    def __init__(self, config: ReplayConfig) -> None:
        self._config = config
        self._lock = Lock()
        self._free: list[AppProcess] = []
        self._all: list[AppProcess] = []
        self._broken: dict[tuple[str, bool], str] = {}
        self._stopped = False

    def take(self, target: str, *, redacted: bool) -> AppProcess:
        """Return an idle process of the function `target`, or start one; end idle processes of other functions.

        Raises `RunLost` if the function cannot be loaded, now or at an earlier attempt, or if the pool was stopped.
        """
        same = (target, redacted)
        with self._lock:
            others = [process for process in self._free if process.runs != same]
            mine = [process for process in self._free if process.runs == same]
            process = mine.pop() if mine else None
            self._free = mine
        # Outside the lock: ending takes up to `_END_S` each, and other threads give processes back meanwhile.
        for other in others:
            other.end()
        if process is not None and process.usable:
            return process
        if self._stopped or same in self._broken:
            raise RunLost(self._broken.get(same, "the cycle was stopped"))
        try:
            return self._started(target, redacted)
        except RunLost as error:
            # A function that cannot be loaded is not tried again: each try may cost an import of minutes.
            self._broken[same] = str(error)
            raise

    def ask(self, process: AppProcess, question: Mapping[str, Any]) -> Mapping[str, Any]:
        """Have a process answer, as `AppProcess.ask` does, and put it back; kill it if it gives no answer."""
        try:
            answer = process.ask(question, self._config.timeout_s)
        except RunLost:
            process.kill()
            raise
        self.give_back(process)
        return answer

    def give_back(self, process: AppProcess) -> None:
        """Return a process to the pool as idle."""
        with self._lock:
            self._free.append(process)

    def stop(self) -> None:
        """Kill all processes of the pool, also those in use; `take` starts no process afterwards."""
        self._stopped = True
        for process in list(self._all):
            process.kill()

    def end(self) -> None:
        """End the idle processes of the pool; processes in use go on."""
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
    """Return the JSON that makes a process repeat a run, with `info` as the new trajectory's name, user and tags."""
    about = {name: getattr(info, name) for name in ("id", "name", "session_id", "user_id", "tags", "metadata")}
    about |= {"scenario": info.scenario_key}
    question = {"trajectory": about, "group": info.group_key, "args": one.args, "kwargs": one.kwargs}
    if one.turn is None:
        return question
    kept = ("index", "message", "finish_reason")
    answers = [
        [prompt_key(call.messages, call.tools), [{name: getattr(each, name) for name in kept} for each in call.choices]]
        for call in one.before
        if call.choices
    ]
    turn, *later = (prompt_key(call.messages, call.tools) for call in one.original.calls[len(one.before) :])
    return question | {"given": {"answers": answers, "turn": turn, "later": later}}
