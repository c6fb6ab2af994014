"""Ctrl-C and SIGTERM: one line, one exit code."""

from __future__ import annotations

import sys

INTERRUPTED = 130


def interrupted() -> int:
    """Say that Ctrl-C was understood, and return its exit code."""
    sys.stderr.write("art-patch: interrupted; what was recorded and published is kept, run it again to go on\n")
    return INTERRUPTED
