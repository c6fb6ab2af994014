"""The steps of training, read back by MLflow itself, in an environment of its own: it brings a hundred megabytes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.environments import ENVIRONMENT, environment, say

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif("ART_PATCH_FULL" not in os.environ, reason="installs MLflow; ART_PATCH_FULL=1 runs it"),
]

VERSIONS = "mlflow-skinny>=3.17,<4"


def test_runs_are_read_back_whole_and_a_second_time_adds_nothing(tmp_path: Path):
    python = environment("mlflow", [VERSIONS])
    script = Path(__file__).with_name("mlflow_round_trip.py")
    variables = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "HOME": str(tmp_path)}
    told = json.loads(say([python, script, tmp_path], env=ENVIRONMENT | variables).stdout.splitlines()[-1])
    target = f"mlflow sqlite:///{tmp_path}/mlflow.db shop"
    assert told["first"] == {"target": target, "episodes": 0, "steps": 2, "written": 15, "already_there": 0}
    assert told["whole"] == {
        "agent@0": {
            "status": "FINISHED", "start_ms": 50_000, "params": {}, "files": {},
            "metrics": {"reward/mean": [[0, 0.25]], "reward/runs": [[0, 2.0]]},
            "tags": {
                "art_patch.policy": "agent@0", "art_patch.base": "/base", "art_patch.base_sha256": "ff",
                "art_patch.state": "retired",
            },
        },
        "agent@1": {
            "status": "FINISHED", "start_ms": 60_000, "files": {"MANIFEST.json": '{"base_sha256": "ff"}'},
            "params": {"learning_rate": "0.0001", "loss": '{"name": "grpo"}'},
            "metrics": {
                "gate/lower_bound": [[1, 0.0625]], "gate/scenarios": [[1, 9.0]], "gate/won": [[1, 1.0]],
                "reward/mean": [[1, 1.0]], "reward/runs": [[1, 1.0]], "train/kl_nats": [[1, 0.125]],
                "train/loss": [[1, 0.375]], "update/epoch": [[0, 0.0], [1, 1.0]], "update/kl_nats": [[0, 0.0]],
                "update/loss": [[0, 0.5], [1, 0.25]],
            },
            "tags": {
                "art_patch.policy": "agent@1", "art_patch.base": "/base", "art_patch.base_sha256": "ff",
                "art_patch.parent": "agent@0", "art_patch.state": "champion",
                "art_patch.path": f"{tmp_path}/shop/adapters/agent@1",
            },
        },
    }  # fmt: skip
    assert told["second"] == {"target": target, "episodes": 0, "steps": 2, "written": 0, "already_there": 15}
    assert told["third"]["written"] == 2
    assert told["last"] == [[1, 1.0], [1, 0.5]]
