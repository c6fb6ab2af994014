"""The contract, asked of a vLLM on a GPU. In float32, so that it can be exact as far as other kernels allow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine_contract import LOADED, EngineContract
from tests.support.engines import Running, make_vllm, serve

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]


@pytest.fixture(scope="module")
def running(
    cuda_vllm: Path, base_dir: Path, adapters: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """vLLM with two policies."""
    home = tmp_path_factory.mktemp("vllm")
    engine = make_vllm(base_dir, adapters, home, device="cuda", gpu_memory_utilization=0.3)
    with serve(engine, policies=LOADED, ready_s=600) as server:
        yield server


@pytest.fixture(scope="module")
def tolerance() -> float:
    """TF32 and other orders of summation, nats."""
    return 5e-3


class TestContractOnCuda(EngineContract):
    """The same promises."""
