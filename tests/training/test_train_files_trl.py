"""A training file gives the weights that TRL's trainers give, from the same LoRA and with the same settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.families_start import FILES, beside_trl

pytest.importorskip("trl", reason="TRL is not installed, so nothing is compared with it; pip install 'trl>=1.16,<2'")


@pytest.mark.parametrize("name", FILES)
def test_the_weights_are_trls(tmp_path: Path, name: str):
    found = beside_trl(tmp_path, name)
    assert found[f"{name}_difference"] <= 1e-5
    assert found[f"{name}_moved"] > 1e-3
