"""The demo's model, made once for all tests of a run: it takes a minute."""

from __future__ import annotations

from pathlib import Path

import pytest
from filelock import FileLock

from art_patch.demo.shop_model import build_model


def demo_models(factory: pytest.TempPathFactory) -> Path:
    """Return a directory for `HOME/models`, in which the model of seed 1 is; no test changes it."""
    base = factory.getbasetemp()
    # A process of pytest-xdist has a directory of its own below that of the run.
    directory = (base.parent if base.name.startswith("popen-") else base) / "demo-models"
    directory.mkdir(exist_ok=True)
    with FileLock(directory / "lock"):
        build_model(directory / "shop-1", seed=1)
    return directory
