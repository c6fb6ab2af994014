"""Training and runs in W&B, written by its real client and read back, in an environment of its own.

Offline runs are read from their files. What is sent to a server goes to a stand-in of W&B's (`wandb_server`), and so
does what `wandb sync` makes of the offline runs, which must come to the same.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from art_patch.trackers.episodes import ACTION_COLUMNS, CONTENT_COLUMNS, EPISODE_COLUMNS
from tests.support.environments import ENVIRONMENT, environment, say

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif("ART_PATCH_FULL" not in os.environ, reason="installs W&B; ART_PATCH_FULL=1 runs it"),
]

VERSIONS = "wandb>=0.31,<0.32"


def w_and_b_run(job: str, key: str, **holds: Any) -> dict[str, Any]:
    about = {"job": job, "id": key, "group": "shop", "project": "shop", "entity": "", "resume": True}
    return about | {"config": {}, "history": [], "summary": {}, "tables": {}, "artifacts": {}} | holds


def table(columns: Sequence[str], *rows: list[Any]) -> dict[str, Any]:
    return {"columns": [*columns], "data": [*rows]}


def row(key: str, policy: str, reward: float) -> list[Any]:
    known = [key, None, "1970-01-01T00:01:10+00:00", 0.0, policy, 1, 0, 0, 0, reward, False]
    return [*known, None, None, None, None, ""]


A, B, C, D = row("a", "agent@0", 0.0), row("b", "agent@0", 0.5), row("c", "agent@1", 1.0), row("d", "agent@1", 0.0)
FRUIT = ["fruit", None, "1970-01-01T00:01:20+00:00", 1.5, "agent@1", 2, 6, 6, 1, None, False]
FRUIT += [None, None, None, "u1", ""]
TRAINED = {"policy": "agent@1", "parent": "agent@0", "base": "/base", "base_sha256": "ff"}
METRICS = {
    "gate/lower_bound": 0.0625, "gate/scenarios": 9, "gate/won": 1, "reward/mean": 1, "reward/runs": 1,
    "train/kl_nats": 0.125, "train/loss": 0.375,
}  # fmt: skip
ADAPTER = {
    "type": "model", "aliases": ["latest", "step-1"], "metadata": TRAINED,
    "files": {"MANIFEST.json": '{"base_sha256": "ff"}'},
}  # fmt: skip
POLICIES, UPDATE, RUNS = "8afd639a944504de", "66d521137321f3f6", "9a3361491c9eab12"


def test_everything_is_read_back_whole_and_a_second_time_adds_nothing(tmp_path: Path):
    python = environment("wandb", [VERSIONS])
    script = Path(__file__).with_name("wandb_round_trip.py")
    told = json.loads(
        say([python, script, tmp_path], env=ENVIRONMENT | {"HOME": str(tmp_path)}).stdout.splitlines()[-1]
    )
    target = f"wandb offline {tmp_path}/out shop"
    assert told["first"] == {"target": target, "episodes": 4, "steps": 2, "written": 19, "already_there": 0}
    summary = {"policy_step": 1, "champion": "agent@1"} | METRICS
    of_update = {"update_step": 1, "update/epoch": 1, "update/loss": 0.25, "update/kl_nats": 0, "state": "champion"}
    history = [{"policy_step": 0, "reward/mean": 0.25, "reward/runs": 2}, {"policy_step": 1} | METRICS]
    updates = [
        {"update_step": 0, "update/epoch": 0, "update/loss": 0.5, "update/kl_nats": 0},
        {"update_step": 1, "update/epoch": 1, "update/loss": 0.25},
    ]
    config = {"learning_rate": 1e-4, "loss": {"name": "grpo"}} | TRAINED
    actions = table(ACTION_COLUMNS, ["lookup", 1, 1.0, 1, 1, 1, 0.0, None])
    assert told["whole"] == {
        "agent": w_and_b_run("policies", POLICIES, summary=summary, history=history),
        "agent@1": w_and_b_run(
            "update", UPDATE, config=config, history=updates, summary=of_update, artifacts={"agent": ADAPTER}
        ),
        "shop": w_and_b_run(
            "episodes", RUNS, tables={"episodes": table(EPISODE_COLUMNS, FRUIT, C, B, A), "actions": actions}
        ),
    }
    assert told["second"] == {"target": target, "episodes": 4, "steps": 2, "written": 0, "already_there": 19}
    assert told["nothing"] == {}
    changed = {"policy_step": 1, "reward/mean": 0.5, "reward/runs": 2}
    assert told["third"]["written"] == 4
    assert told["changed"] == {
        "agent": w_and_b_run("policies", POLICIES, history=[changed], summary=summary | changed),
        "shop": w_and_b_run(
            "episodes", RUNS, tables={"episodes": table(EPISODE_COLUMNS, FRUIT, D, C, B, A), "actions": actions}
        ),
    }
    assert told["after erasing"]["written"] == 1
    left = {"episodes": table(EPISODE_COLUMNS, D, C, B, A), "actions": table(ACTION_COLUMNS)}
    assert told["left"] == {"shop": w_and_b_run("episodes", RUNS, tables=left)}
    assert told["fourth"]["written"] == 1
    whole = ADAPTER | {"files": ADAPTER["files"] | {"adapter_model.safetensors": "weights"}}
    assert told["weights"] == {
        "agent@1": w_and_b_run("update", UPDATE, summary=of_update, artifacts={"agent": whole})
    }  # fmt: skip

    online = told["first online"]["target"].removesuffix(" shop")
    assert online.startswith("wandb http://127.0.0.1:")
    assert told["first online"] == told["first"] | {"target": f"{online} shop"}
    assert told["second online"] == told["second"] | {"target": f"{online} shop"}
    about: dict[str, Any] = {"group": "shop", "project": "shop", "config": {}, "tables": {}, "artifacts": []}
    versions = [{"name": "agent"} | ADAPTER, {"name": "agent"} | whole]
    assert told["online"] == {
        "agent": about | {"job": "policies", "history": [*history, changed], "summary": summary | changed},
        "agent@1": about | {
            "job": "update", "config": config, "history": updates, "summary": of_update, "artifacts": versions
        },
        "shop": about | {"job": "episodes", "history": [], "summary": {}, "tables": left},
    }  # fmt: skip
    assert told["synced"] == told["online"]
    assert told["not answered"] == []

    by_mode = f"wandb offline {tmp_path}/by-mode team/theirs"
    assert told["by mode"] == {"target": by_mode, "episodes": 4, "steps": 2, "written": 19, "already_there": 0}
    asked = '[{"role": "user", "parts": [{"type": "text", "content": "hi"}]}]'
    answered = '[{"role": "assistant", "parts": [{"type": "text", "content": "yes"}], "finish_reason": "stop"}]'
    said = table((*EPISODE_COLUMNS, *CONTENT_COLUMNS), *([*one, asked, answered] for one in (D, C, B, A)))
    texts = w_and_b_run("episodes", RUNS, tables=left | {"episodes": said})
    assert told["texts"] == texts | {"project": "theirs", "entity": "team"}
    disabled = "WANDB_MODE is disabled, so W&B would take nothing; unset it, or say --offline DIR"
    assert told["disabled"] == f"TrackerError: {disabled}"
    assert re.fullmatch(
        r"TrackerError: .*No API key configured.*look at WANDB_API_KEY.*--offline DIR.*", told["no key"]
    )
