"""The demo's child processes: the engine (`art-patch serve`) and the agent, with and without art-patch.

Each child ends when the demo ends: it is stopped at the end of its `with` block, and if the demo is killed, on Linux
the kernel sends the child SIGTERM.
"""

import json
import os
import queue
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from art_patch._lib.process import Child
from art_patch.demo.shop import TOOLS
from art_patch.errors import ArtPatchError, EngineError

AGENT = Path("shop_agent", "agent.py")
# Port 9 (discard): the demo has no provider, so a call that falls back to it fails and is counted.
NO_UPSTREAM = "http://127.0.0.1:9/v1"


@dataclass(frozen=True, slots=True)
class Program:
    """An agent program for the demo: it reads tasks and writes conversations, as `examples/shop_agent` describes."""

    source: str  # Python source of the agent, with its two lines of ours
    python: str = sys.executable  # the interpreter of its environment
    variables: Mapping[str, str] = field(default_factory=dict[str, str])  # additional environment variables
    tools: Sequence[dict[str, Any]] = tuple(TOOLS)  # the tools in its requests


def agent_source() -> str:
    """Return the Python source of the example agent, from the checkout or from the files of the installed wheel."""
    installed = Path(sysconfig.get_path("data"), "share/art-patch/examples")
    for root in (Path(__file__).parents[2] / "examples", installed):
        if (root / AGENT).exists():
            return (root / AGENT).read_text()
    raise ArtPatchError(f"the example agent {AGENT} is not installed; install art-patch again, or run from a checkout")


def unpatched(program: Program) -> Program:
    """Return the agent program without the two lines that import art_patch and call `art.patch()`."""
    ours = ("import art_patch", "art.patch")
    lines = program.source.splitlines(keepends=True)
    return replace(program, source="".join(line for line in lines if not line.startswith(ours)))


class Process(Child):
    """A child process that is stopped at the end of its `with` block, and when the demo ends."""

    def __init__(self, command: list[str], environment: Mapping[str, str], log: Path) -> None:
        super().__init__(command, {**os.environ, **environment}, log=log, kernel_ends_it=True)

    def __exit__(self, *raised: object) -> None:
        """Stop the process."""
        self.stop()


class Engine(Process):
    """A child process that runs `art-patch serve` on a free port; `base_url` is its address."""

    def __init__(self, base: Path, home: Path, project: str, log: Path, engine: str = "embedded") -> None:
        """Start `art-patch serve` and wait until it answers; raises an `EngineError` if it ends before that."""
        command = [sys.executable, "-m", "art_patch", "serve", "--base", str(base), "--port", "0", "--json"]
        command += ["--engine", engine, "--home", str(home), "--project", project, "--threads", "1", "--who", "demo"]
        super().__init__(command, {}, log)
        assert self.stdout is not None
        try:
            first = json.loads(self.stdout.readline() or "{}")
        except BaseException:
            self.stop()
            raise
        if "base_url" not in first:
            self.stop()
            raise EngineError(f"the engine did not start: {first.get('message') or self.last_words()}")
        self.base_url, self.champion, self.kind = (str(first[key]) for key in ("base_url", "champion", "engine"))


class Agent(Process):
    """A child process that runs the example agent; it works on the tasks that `ask` sends to it."""

    def __init__(self, program: Program, path: Path, environment: Mapping[str, str], log: Path) -> None:
        """Write the agent program's source to `path` and start it as a child process."""
        path.write_text(program.source)
        variables = {"OPENAI_API_KEY": "none", **program.variables, **environment}
        super().__init__([program.python, str(path)], variables, log)
        self._waiting: dict[str, queue.SimpleQueue[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._writing = threading.Lock()  # a second lock: the agent may stop reading until its answers are read
        self._asked = 0  # number of tasks sent so far, and the id of the last one
        threading.Thread(target=self._read, name="demo-agent-reader", daemon=True).start()

    def ask(
        self, tasks: Iterable[Mapping[str, Any]], *, done: Callable[[int], None] | None = None
    ) -> list[dict[str, Any]]:
        """Send tasks (`question`, `prices`, perhaps `temperature`) and return their results in order.

        A result is `{"messages": [...]}` or `{"error": "..."}`. `done` is called with the number of tasks finished so
        far. Raises an `ArtPatchError` if the agent ends before it has answered all tasks.
        """
        answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        keys: list[str] = []
        assert self.stdin is not None
        for task in tasks:
            with self._writing:
                self._asked += 1
                keys.append(key := str(self._asked))
                with self._lock:
                    self._waiting[key] = answers
                try:
                    self.stdin.write(json.dumps({**task, "id": key}) + "\n")
                except OSError:
                    raise ArtPatchError(f"the agent died: {self.last_words()}") from None
        results: dict[str, dict[str, Any]] = {}
        while len(results) < len(keys):
            answer = answers.get()
            if "id" not in answer:
                raise ArtPatchError(f"the agent died: {self.last_words()}")
            results[answer["id"]] = answer
            if done is not None:
                done(len(results))
        return [results[key] for key in keys]

    def stop(self, grace_s: float = 15.0) -> None:
        """End the agent's input and wait until it has ended by itself; after `grace_s`, send SIGTERM, then SIGKILL."""
        # SIGTERM ends a Python program without its exit handlers, so the calls that are not in the store yet were lost.
        assert self.stdin is not None
        with suppress(OSError):  # it died before it read its last line
            self.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.wait(grace_s)
        super().stop(grace_s)

    def _read(self) -> None:
        assert self.stdout is not None
        try:
            for line in self.stdout:
                answer = json.loads(line)
                with self._lock:
                    waiting = self._waiting.pop(answer["id"])
                waiting.put(answer)
        except ValueError:
            pass  # our side of the pipe was closed
        with self._lock:
            left, self._waiting = self._waiting, {}
        for waiting in left.values():
            waiting.put({})
