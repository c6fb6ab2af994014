"""Updates by peft on CUDA: of what an engine sampled there, and beside the same update on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from art_patch.policies import read_base_model, validate_adapter
from art_patch.serving import EmbeddedEngine
from art_patch.training import Example, Row, Sibling, TrainConfig, TrainGroup, run_job
from tests.support.asking import PROOF, ask
from tests.support.engines import Running, serve
from tests.support.train_jobs import make_job, plain_logprobs, plain_model, random_groups

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]


def sampled(running: Running, seed: int) -> TrainGroup:
    """Four answers of the engine, the first two better than the others."""
    answer = ask(running.openai, "agent@0", n=4, max_tokens=60, seed=seed, **PROOF)
    prompt, siblings = answer["prompt_token_ids"], list[Sibling]()
    for number, choice in enumerate(answer["choices"]):
        given, ids = len(prompt), choice["token_ids"]
        logprobs = tuple(each["logprob"] for each in choice["logprobs"]["content"])
        row = Row(
            (*prompt, *ids),
            (False,) * given + (True,) * len(ids),
            (0.0,) * given + logprobs,
            (1.0,) * (given + len(ids)),
        )
        siblings.append(Sibling(f"t{seed}-{number}", Example((row,), 1.0 if number < 2 else -1.0), True))
    return TrainGroup(f"g{seed}", tuple(siblings))


@pytest.mark.parametrize(("dtype", "most_nats"), [("float32", 1e-3), ("bfloat16", TrainConfig().max_gap_nats)])
def test_an_update_of_what_the_engine_sampled_is_served(base_dir: Path, tmp_path: Path, dtype: str, most_nats: float):
    """The trainer scores it as the engine did, on average; in bfloat16 as near as an update asks for."""
    adapters = tmp_path / "adapters"
    engine = EmbeddedEngine.from_pretrained(base_dir, adapters_root=adapters, device="cuda", dtype=dtype)
    with serve(engine, ready_s=180) as running:
        groups = [sampled(running, seed) for seed in range(8)]
        metrics = run_job(make_job(base_dir, adapters / "agent@1", groups, dtype=dtype), tmp_path / "job")
        assert metrics.logprob_gap_mean_nats is not None
        assert (metrics.steps, metrics.logprob_gap_mean_nats <= most_nats) == (1, True), metrics
        assert metrics.why_not_shared is None
        running.client.load("agent@1")
        assert ask(running.openai, "agent@1", max_tokens=4)["model"] == "agent@1"


def test_both_devices_make_about_the_same_policy(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    groups = random_groups(base, groups=4, siblings=4)
    rows = [row for group in groups for sibling in group.siblings for row in sibling.example.rows]
    said: list[torch.Tensor] = []
    for step in (1, 2):
        name = f"agent@{step}"
        run_job(make_job(base, tmp_path / "adapters" / name, groups, dtype="float32"), tmp_path / name)
        validate_adapter(tmp_path / "adapters", name, read_base_model(base))
        model = plain_model(base, tmp_path / "adapters" / name)
        said.append(torch.tensor([value for row in rows for value in plain_logprobs(model, row)]))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch.testing.assert_close(said[0], said[1], atol=0.02, rtol=0)
