"""An update by Unsloth on CUDA: the policy that peft makes, as far as bfloat16 and other kernels allow."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from art_patch.policies import read_base_model, validate_adapter
from art_patch.training import run_job
from tests.support.train_jobs import make_job, plain_logprobs, plain_model, random_groups

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
    pytest.mark.skipif(find_spec("unsloth") is None, reason="no Unsloth in this environment"),
]


def test_both_backends_make_about_the_same_policy(base: Path, tmp_path: Path):
    groups = random_groups(base, groups=4, siblings=4)
    rows = [row for group in groups for sibling in group.siblings for row in sibling.example.rows]
    said: dict[str, torch.Tensor] = {}
    for step, backend in enumerate(("peft", "unsloth"), start=1):
        for more in (0, 2):  # anew, then continued
            parent = tmp_path / "adapters" / f"agent@{step}" if more else None
            job = make_job(base, tmp_path / "adapters" / f"agent@{step + more}", groups, backend=backend, parent=parent)
            metrics = run_job(job, tmp_path / job.target.name)
            assert metrics.steps == 1
            validate_adapter(tmp_path / "adapters", job.target.name, read_base_model(base))
        model = plain_model(base, tmp_path / "adapters" / f"agent@{step + 2}")
        said[backend] = torch.tensor([value for row in rows for value in plain_logprobs(model, row)])
    torch.testing.assert_close(said["unsloth"], said["peft"], atol=0.1, rtol=0)
