"""One tiny base and four adapters for the folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny import make_tiny_adapter, make_tiny_model


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "base")


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory, base_dir: Path) -> Path:
    """agent@1 to agent@4, all different."""
    root = tmp_path_factory.mktemp("adapters")
    for step in (1, 2, 3, 4):
        make_tiny_adapter(root, base_dir, "agent", step, seed=step)
    return root
