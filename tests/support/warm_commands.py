"""Runs `art-patch` in processes that are forked from one which has imported it: a command starts within milliseconds.

Importing takes most of the second that a command takes, and of the seven that `serve` takes until it answers; and the
tests run hundreds of them. A forked process is one of its own, with its own arguments, environment, directory, output
and exit code. It differs from a new one in what was imported before, and is killed with whom it was forked for. Tests
of imports and of the first start begin a new one.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

# What most commands import when they need it. None of it starts a thread, which no fork would survive.
PRELOADED = (
    "art_patch.cli.app", "art_patch.cli.conversation", "art_patch.doctor.examination",
    "art_patch.formats.files", "art_patch.insights.switch_advice", "art_patch.pipeline.cycle_run",
    "art_patch.pipeline.promote_policy", "art_patch.pipeline.single_steps", "art_patch.promotion.transitions",
    "art_patch.recording.takeover", "art_patch.store.maintain", "art_patch.store.store", "openai", "rich.live",
    "rich.progress", "rich.table", "sqlalchemy.dialects.sqlite.pysqlite", "art_patch.serving.embedded.engine",
    "art_patch.training.loop", "peft", "transformers.models.llama.modeling_llama", "transformers.models.auto",
)  # fmt: skip

# Variables that libraries read when they are imported: a command that gets one of these begins in a new process.
_NOT_WARM = frozenset({"HF_ENDPOINT", "HF_HOME", "HF_HUB_OFFLINE", "HF_TOKEN", "TRANSFORMERS_OFFLINE", "TZ"})

_ROOT = Path(__file__).parents[2]
_ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("ART_PATCH_")}


def run(arguments: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run `art-patch` with these arguments in exactly this environment, in the directory of the caller."""
    if _NOT_WARM & environment.keys() - _ENVIRONMENT.keys():
        command = [sys.executable, "-m", "art_patch", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=dict(environment))
    outputs = [os.memfd_create(name) for name in ("stdout", "stderr")]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(timeout_s)
            connection.connect(_server())
            asked = {"arguments": list(arguments), "environment": dict(environment), "directory": os.getcwd()}
            socket.send_fds(connection, [json.dumps(asked).encode()], outputs)
            try:
                _, code = (int(connection.recv(64)) for _ in range(2))
            except TimeoutError:
                raise subprocess.TimeoutExpired(["art-patch", *arguments], timeout_s) from None
        said = [os.pread(output, os.fstat(output).st_size, 0).decode() for output in outputs]
        return subprocess.CompletedProcess(["art-patch", *arguments], code, *said)
    finally:
        for output in outputs:
            os.close(output)


def start(arguments: Sequence[str], environment: Mapping[str, str], **how: Any) -> subprocess.Popen[str]:
    """Start `art-patch` as `subprocess.Popen` would, which gets `how`; the process itself has another id."""
    command = [sys.executable, "-S", __file__, "stand for", _server(), *arguments]
    return subprocess.Popen(command, env=dict(environment), text=True, **how)


def _stand_for(address: str, arguments: list[str]) -> NoReturn:
    """Have a command run with the caller's files; pass signals on to it, and end as it ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(address)
        asked = {"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd()}
        socket.send_fds(connection, [json.dumps(asked).encode()], [1, 2])
        pid = int(connection.recv(64))
        for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(one, lambda number, _: os.kill(pid, number))
        code = int(connection.recv(64))
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


@cache
def _server() -> str:
    """Start the process that forks, once in each process of pytest; return its address."""
    directory = tempfile.TemporaryDirectory()
    address = f"{directory.name}/socket"
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, "fork", address], cwd=_ROOT, env=_ENVIRONMENT, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    asks, answers = process.stdin, process.stdout
    assert asks is not None
    assert answers is not None

    def stop() -> None:
        asks.close()  # at whose end it ends
        process.wait(30)
        answers.close()
        directory.cleanup()

    atexit.register(stop)
    assert answers.readline() == b"ready\n"
    return address


def _serve(address: str) -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for commands
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    listener.close()
                    _answer(connection)


def _answer(connection: socket.socket) -> NoReturn:
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for inherited in (0, 1):  # of the process that forks, for which somebody waits
            os.dup2(nothing, inherited)
        said, outputs, _, _ = socket.recv_fds(connection, 1 << 20, 2)
        asked = json.loads(said)
        if (pid := os.fork()) == 0:
            connection.close()
            _become(asked["arguments"], asked["environment"], asked["directory"], outputs)
        for output in outputs:
            os.close(output)
        connection.send(str(pid).encode())
        ended = os.pidfd_open(pid)
        if ended not in select.select([ended, connection], [], [])[0]:
            os.kill(pid, signal.SIGKILL)  # whom it was forked for is gone
        else:
            connection.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    finally:
        os._exit(0)


def _become(arguments: list[str], environment: dict[str, str], directory: str, outputs: list[int]) -> NoReturn:
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for target, output in enumerate(outputs, 1):
            os.dup2(output, target)
            os.close(output)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        sys.path[0] = directory
        sys.modules["__main__"].__package__ = None  # whose name a usage message would give
        sys.argv = ["art-patch", *arguments]
        try:
            importlib.import_module("art_patch.cli").main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        threading._shutdown()  # waits for threads, as the interpreter does before it ends
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[2]) if sys.argv[1] == "fork" else _stand_for(sys.argv[2], sys.argv[3:])
