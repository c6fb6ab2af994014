"""The contract, asked of the embedded engine on a GPU. In float32, so that it is exact as far as kernels allow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from art_patch.serving import EmbeddedEngine
from tests.support.engine_contract import LOADED, EngineContract
from tests.support.engines import Running, serve

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]


@pytest.fixture(scope="module")
def running(base_dir: Path, adapters: Path) -> Iterator[Running]:
    """The engine with two policies."""
    engine = EmbeddedEngine.from_pretrained(base_dir, adapters_root=adapters, device="cuda", dtype="float32")
    with serve(engine, policies=LOADED, ready_s=180) as server:
        yield server


@pytest.fixture(scope="module")
def tolerance() -> float:
    """Other orders of summation than the CPU's, nats."""
    return 1e-3


class TestContractOnCuda(EngineContract):
    """The same promises."""
