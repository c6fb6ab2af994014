"""Patches a Python program, and the programs that it starts, without a change in their code: `art-patch run`.

In: settings. Out: an environment in which every Python process finds our `sitecustomize` first. It patches the process
when the SDK (or another library with an integration) is imported, and runs the `sitecustomize` that Python would have
found without it. Before that import nothing of ours is loaded, so a process that never calls a model pays nothing.

Python ignores `PYTHONPATH` under `-E` and `-I`, and `sitecustomize` under `-S`; such a process is not patched.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# This directory holds `sitecustomize.py` alone, because each module in it would hide a module of the app.
SHIM = Path(__file__).parent / "on_path"


def environment(settings: Mapping[str, str], base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment `base` with `settings` in it, and with our `sitecustomize` in front of all others."""
    given = {f"ART_PATCH_{name.upper()}": value for name, value in settings.items()}
    before = base.get("PYTHONPATH")
    others = [part for part in before.split(os.pathsep) if part != str(SHIM)] if before else []
    return {**base, **given, "PYTHONPATH": os.pathsep.join([str(SHIM), *others])}
