"""Runs one command and lets nothing of it survive: not its children, and not the end of whoever started us.

A script, not a module: it starts in milliseconds and imports the standard library alone. It leads a process group of
its own, and everything that vLLM starts stays in that group. vLLM's workers outlive an API server that is killed
(vLLM issue 55510), so the whole group is killed as soon as

- the command has ended, in whatever way, or
- standard input is closed: our parent is gone, and nobody is left to be served.

SIGTERM is handed on to the command, which finishes what it has begun.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel for a SIGKILL when the parent is gone; Linux."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_parent() -> None:
    """Wait for the end of standard input, then take everything along."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """See the module."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(
        sys.argv[1:],
        stdin=subprocess.DEVNULL,
        preexec_fn=die_with_parent if sys.platform == "linux" else None,
    )

    def hand_on(*_: object) -> None:
        child.terminate()

    signal.signal(signal.SIGTERM, hand_on)
    threading.Thread(target=end_with_parent, daemon=True).start()
    code = child.wait()
    print(f"vLLM ended with exit code {code}", file=sys.stderr, flush=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
