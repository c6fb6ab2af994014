"""A script that runs one command, and kills all processes of the command when the command or the script's parent ends.

    python -I -S group_guard.py NAME COMMAND...

It leads a process group, which is killed when the command has ended, because its children may outlive it (vLLM issue
55510), and when the script's standard input is closed, because its parent has ended. SIGTERM is passed on to the
command, which then finishes its work and ends.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading

_PR_SET_PDEATHSIG = 1


def die_with_parent(sent: int = signal.SIGKILL) -> None:
    """Have the Linux kernel send the signal `sent` to this process when its parent ends; call it after the fork."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, sent)


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Run the command in `sys.argv`, then kill its process group. This process belongs to it, so nothing returns."""
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
