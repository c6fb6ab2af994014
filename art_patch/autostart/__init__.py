"""Patches a Python program, and the programs that it starts, without a change in their code: `art-patch run`.

In: settings. Out: environment variables with which every Python process imports our module `sitecustomize` at its
start. This module runs the `sitecustomize` that Python would have found without ours. When the program imports the SDK,
or a known library that imports the SDK or is an SDK of another provider, it calls `patch()`. Until then nothing else of
art_patch is loaded, except for `http_calls` beside an HTTP library, so a process that calls no model is not slower.
"""

import os
from collections.abc import Mapping
from pathlib import Path

# This directory holds `sitecustomize.py` alone, because each module in it would hide a module of the app.
SHIM = Path(__file__).parent / "on_path"


def environment(settings: Mapping[str, str], base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables `base` with `settings` added, and our `sitecustomize` first on `PYTHONPATH`."""
    given = {f"ART_PATCH_{name.upper()}": value for name, value in settings.items()}
    before = base.get("PYTHONPATH")
    others = [part for part in before.split(os.pathsep) if part != str(SHIM)] if before else []
    return {**base, **given, "PYTHONPATH": os.pathsep.join([str(SHIM), *others])}
