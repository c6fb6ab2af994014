"""A script that runs one command, and kills everything that the command started when it or our parent ends.

    python -I -S group_guard.py NAME COMMAND...

It is a script beside a module, so that it starts in milliseconds; it imports the standard library alone. It leads a
process group in which everything stays that the command starts. The whole group is killed as soon as

- the command has ended, in whatever way; its children may outlive it (vLLM's workers do, vLLM issue 55510), or
- standard input is closed, because our parent has ended.

SIGTERM is passed on to the command, which finishes the work that it has begun.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading

_PR_SET_PDEATHSIG = 1


def die_with_parent(sent: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends. Linux only; call it after the fork."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, sent)


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Run the command of `sys.argv`; never returns, because this process is in the group that is killed."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C ends
    name, *command = sys.argv[1:]
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        # In case this process is killed by itself: then nothing else would end the command.
        preexec_fn=die_with_parent if sys.platform == "linux" else None,
    )

    def hand_on(*_: object) -> None:
        child.terminate()

    signal.signal(signal.SIGTERM, hand_on)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    code = child.wait()
    print(f"{name} ended with exit code {code}", file=sys.stderr, flush=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
