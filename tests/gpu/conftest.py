"""A CUDA machine with vLLM, or the reason why these tests are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from art_patch.serving import gpus
from art_patch.serving.vllm.environment import find_vllm
from art_patch.settings import load_settings


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """What is compared with the card's answers is computed as on other machines."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cuda_vllm() -> Path:
    """The interpreter of a vLLM for CUDA."""
    if not gpus():
        pytest.skip("no NVIDIA GPU")
    settings = load_settings()
    found = find_vllm(settings.vllm_python, settings.environments)
    if found is None or found.device != "cuda":
        pytest.skip("no vLLM for CUDA: art-patch init vllm --cuda")
    return found.python
