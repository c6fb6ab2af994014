"""`art-patch` as a child of a script: `python -m art_patch.rollouts.serving_process serve --base ...`.

The command line itself, so that what a script starts is what a person starts; it only ends when the script does.
"""

from __future__ import annotations

import runpy

from art_patch.rollouts.child import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    runpy.run_module("art_patch", run_name="__main__")
