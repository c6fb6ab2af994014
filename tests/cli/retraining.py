"""`art-patch retrain` in processes of its own that a fork server makes: all is imported once, not ten times."""

from __future__ import annotations

import os
import sys

import art_patch.pipeline.cycle
import art_patch.training.loop.update  # noqa: F401 - for the fork server
from art_patch.cli.app import run_app
from art_patch.rewards.judge.client import load_litellm

load_litellm()


def retrain(home: str, *arguments: str) -> None:
    """Run the command as a shell would; ends the process with its exit code."""
    os.environ["ART_PATCH_HOME"] = home
    sys.argv = ["art-patch", "retrain", *arguments]
    run_app()
