"""The command line: `art-patch run`, `serve`, `retrain`, `status`, `erase`, `store` and what `--help` lists besides.

Each command is a thin shell: settings in, one call, one answer out. Answers go to stdout (with `--json` as one JSON
object on one line), progress and errors to stderr. Every error of `art_patch.errors` becomes one line and its own exit
code; 0 is success, "nothing to do" included; 130 is Ctrl-C.
"""

from __future__ import annotations

import sys

from art_patch.cli.interruption import interrupted


def main() -> None:
    """Entry point of `art-patch`."""
    try:
        from art_patch.cli.app import run

        run()
    except KeyboardInterrupt:  # it may come while the first module is imported
        sys.exit(interrupted())
