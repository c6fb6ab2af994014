"""The command line: `art-patch run`, `serve`, `retrain`, `status` and the other commands that `--help` lists.

Each command reads its options, calls one function of the package and prints its result. Results go to stdout (with
`--json` as one JSON object on one line), progress and errors to stderr. An error of `art_patch.errors` becomes one line
and the exit code of its class. Exit code 0 is success, which includes "nothing to do"; 130 is Ctrl-C.
"""

import sys

from art_patch.cli.output import interrupted


def main() -> None:
    """Run the program `art-patch`; the package's entry point for it."""
    try:
        from art_patch.cli.app import run_app

        run_app()
    except KeyboardInterrupt:  # Ctrl-C may come while the first module is still being imported
        sys.exit(interrupted())
