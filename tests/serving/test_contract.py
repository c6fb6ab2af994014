"""What every engine promises (`art_patch.serving.contract`), asked of the embedded engine and of a real vLLM alike."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from art_patch.serving import EmbeddedEngine
from tests.support.engine_contract import LOADED, EngineContract
from tests.support.engines import Running, make_vllm, serve


@pytest.fixture(scope="module", params=["embedded", pytest.param("vllm", marks=pytest.mark.vllm)])
def running(
    request: pytest.FixtureRequest, base_dir: Path, adapters: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """The engine with two policies; tests may load and unload others."""
    if request.param == "embedded":
        engine: Any = EmbeddedEngine.from_pretrained(base_dir, adapters_root=adapters)
    else:
        engine = make_vllm(base_dir, adapters, tmp_path_factory.mktemp("vllm"))
    with serve(engine, policies=LOADED, ready_s=180) as server:
        yield server


@pytest.fixture(scope="module")
def tolerance() -> float:
    """What two ways to compute a log-probability in float32 on a CPU may differ by, nats."""
    return 1e-4


class TestContract(EngineContract):
    """Both engines in turn."""
