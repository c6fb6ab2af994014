"""Autostart: `art-patch run -- COMMAND` patches a Python program, and the ones it starts, without a line in it.

In: settings. Out: an environment in which every Python process finds our `sitecustomize` first, patches itself when
the SDK (or another library whose calls we look after) is imported, and goes on with the `sitecustomize` that it would
have had. Nothing of ours is imported before that, so a process that never needs us pays nothing.

Python ignores `PYTHONPATH` under `-E` and `-I`, and `sitecustomize` under `-S`; such a process is not patched.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# Holds `sitecustomize.py` and nothing else, because every module in it would hide one of the app's.
SHIM = Path(__file__).parent / "on_path"


def environment(settings: Mapping[str, str], base: Mapping[str, str]) -> dict[str, str]:
    """Return `base` with the settings in it, and our `sitecustomize` in front of all others.

    Args:
        settings: values by the names of `Settings`.
        base: the environment as it is.
    """
    given = {f"ART_PATCH_{name.upper()}": value for name, value in settings.items()}
    before = base.get("PYTHONPATH")
    others = [part for part in before.split(os.pathsep) if part != str(SHIM)] if before else []
    return {**base, **given, "PYTHONPATH": os.pathsep.join([str(SHIM), *others])}
