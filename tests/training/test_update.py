"""The update on a real (random, tiny) model: exact log-probabilities, exact masks, a policy that learns."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from art_patch.errors import AdapterRejected, TrainingError
from art_patch.records import Choice, Trajectory
from art_patch.serving.adapters import validate_adapter
from art_patch.serving.base_model import base_fingerprint, read_base_model
from art_patch.serving.canary import Canary
from art_patch.training import TrainConfig
from art_patch.training.advantages import Sample
from art_patch.training.logprobs import TrainRow, micro_batches, score_rows
from art_patch.training.rows import Row, rows_of
from art_patch.training.update import load_policy, update
from tests.factory import make_call, make_trajectory
from tests.tiny import make_tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("base"), hidden=32, vocab_size=320)


@pytest.fixture(scope="module")
def model(base: Path) -> Any:
    model, _ = load_policy(str(base), None, TrainConfig(lora_rank=4))
    model.double()  # transformers computes norms in fp32 all the same: gradients agree to about 1e-7
    with torch.no_grad():  # B starts at zero; then A would have no gradient to check
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.05)
    return model


def row(*tokens: tuple[int, bool], temperature: float = 1.0) -> Row:
    ids, sampled = zip(*tokens, strict=True)
    return Row(
        ids, sampled, tuple(-1.0 if s else 0.0 for s in sampled), tuple(temperature if s else 1.0 for s in sampled)
    )


ROWS = [
    TrainRow(row((5, False), (6, False), (7, True), (8, True), (9, False), (10, True)), 1.0),
    TrainRow(row((11, False), (12, True)), -1.0),
    TrainRow(row((13, False), (14, False), (15, False), (16, True), (17, True), temperature=0.7), 0.5),
]


def full_logprobs(model: Any, item: TrainRow) -> list[float]:
    """The plain way: all logits of one row, no padding."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([item.row.ids_T])).logits[0].float()
    return [
        torch.log_softmax(logits[t - 1] / item.row.temperature_T[t], -1)[item.row.ids_T[t]].item()
        for t in range(1, len(item.row.ids_T))
        if item.row.sampled_T[t]
    ]


def gradient(model: Any, batch: list[TrainRow]) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    scored = score_rows(model, batch, CPU)
    (scored.logprob_N * scored.advantage_N).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_logprobs_of_a_padded_batch_are_those_of_each_row_alone(model: Any):
    scored = score_rows(model, ROWS, CPU)
    expected = [value for item in ROWS for value in full_logprobs(model, item)]
    torch.testing.assert_close(scored.logprob_N.detach().float(), torch.tensor(expected), atol=1e-5, rtol=0)
    assert scored.recorded_N.tolist() == [-1.0] * 6
    assert scored.advantage_N.tolist() == [1, 1, 1, -1, 0.5, 0.5]


def test_a_prompt_or_tool_token_is_never_a_target_and_a_sampled_one_always_is(model: Any):
    item = ROWS[0]
    reference = gradient(model, [item])
    last = TrainRow(replace(item.row, ids_T=(*item.row.ids_T[:-1], 77)), item.advantage)
    assert any(not torch.equal(reference[n], g) for n, g in gradient(model, [last]).items())
    unsampled_tail = TrainRow(
        Row(
            (*item.row.ids_T, 50),
            (*item.row.sampled_T, False),
            (*item.row.logprobs_T, 0.0),
            (*item.row.temperature_T, 1.0),
        ),
        1.0,
    )
    other_tail = TrainRow(replace(unsampled_tail.row, ids_T=(*item.row.ids_T, 51)), 1.0)
    for name, grad in gradient(model, [other_tail]).items():
        torch.testing.assert_close(grad, reference[name], atol=1e-12, rtol=1e-9)
    for name, grad in gradient(model, [unsampled_tail]).items():
        torch.testing.assert_close(grad, reference[name], atol=1e-12, rtol=1e-9)


def test_siblings_do_not_see_each_other(model: Any):
    alone = score_rows(model, [ROWS[1]], CPU).logprob_N
    beside = score_rows(model, [ROWS[1], ROWS[0]], CPU).logprob_N[:1]
    torch.testing.assert_close(alone, beside, atol=1e-12, rtol=0)


@pytest.mark.parametrize("tokens", [1, 6, 7, 12, 10_000])
def test_micro_batches_change_no_gradient(model: Any, tokens: int):
    whole = gradient(model, ROWS)
    batches = list(micro_batches(ROWS, tokens))
    assert sorted(id(item) for batch in batches for item in batch) == sorted(id(item) for item in ROWS)
    summed: dict[str, torch.Tensor] = {}
    for batch in batches:
        for name, grad in gradient(model, batch).items():
            summed[name] = summed.get(name, torch.zeros_like(grad)) + grad
    for name, grad in whole.items():
        torch.testing.assert_close(summed[name], grad, atol=1e-6, rtol=1e-5)


def test_a_conversation_in_one_row_has_the_gradient_of_its_turns_apart(model: Any):
    both = make_trajectory(
        "t", make_call("a", prompt=(5, 6), answer=(7, 8)), make_call("b", prompt=(5, 6, 7, 8, 9), answer=(10,))
    )
    merged = [TrainRow(r, 1.0) for r in rows_of(both, max_tokens=99)]
    apart = [TrainRow(r, 1.0) for call in both.calls for r in rows_of(make_trajectory("t", call), max_tokens=99)]
    assert (len(merged), len(apart)) == (1, 2)
    split = gradient(model, apart)
    for name, grad in gradient(model, merged).items():
        torch.testing.assert_close(grad, split[name], atol=1e-6, rtol=1e-5)


# the whole update


def sampled_by_base(base: Path, prompt: tuple[int, ...], answer: tuple[int, ...], key: str) -> Trajectory:
    """A trajectory with the base's own log-probabilities, as the engine would have recorded them."""
    model, _ = load_policy(str(base), None, TrainConfig())
    item = TrainRow(row(*((i, False) for i in prompt), *((i, True) for i in answer)), 1.0)
    logprobs = tuple(full_logprobs(model, item))
    choice = Choice(0, {"role": "assistant", "content": key}, "stop", answer, logprobs)
    return make_trajectory(key, make_call(key, prompt=prompt, choices=(choice,)))


@pytest.fixture(scope="module")
def samples(base: Path) -> list[Sample]:
    good = sampled_by_base(base, (5, 6, 7), (20, 21), "good")
    bad = sampled_by_base(base, (5, 6, 7), (30, 31), "bad")
    return [Sample(good, 1.0), Sample(bad, -1.0)]


def run(base: Path, target: Path, samples: list[Sample], parent: Path | None = None, **changes: Any):
    config = TrainConfig(**({"learning_rate": 5e-3, "epochs": 1, "minibatches": 1, "lora_rank": 4} | changes))
    return update(
        samples, base=str(base), base_sha256=base_fingerprint(base), parent=parent, target=target, config=config
    )


def score(base: Path, adapter: Path | None, sample: Sample) -> float:
    model, _ = load_policy(str(base), adapter, TrainConfig())
    (only,) = rows_of(sample.trajectory, max_tokens=99)
    return sum(full_logprobs(model, TrainRow(only, 1.0)))


def ids_of(sample: Sample) -> tuple[int, ...]:
    (only,) = rows_of(sample.trajectory, max_tokens=99)
    return only.ids_T


def every_logprob(base: Path, adapter: Path | None, canary: Canary) -> list[float]:
    model, _ = load_policy(str(base), adapter, TrainConfig())
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=torch.tensor([canary.token_ids])).logits[0], dim=-1)
    return [logprobs[place, token].item() for place, token in enumerate(canary.targets)]


def test_an_update_moves_the_policy_towards_the_better_answer_and_publishes_what_an_engine_accepts(
    base: Path, samples: list[Sample], tmp_path: Path
):
    target = tmp_path / "agent@1"
    metrics = run(base, target, samples)
    good, bad = samples
    assert score(base, target, good) > score(base, None, good)
    assert score(base, target, bad) < score(base, None, bad)
    published = validate_adapter(tmp_path, "agent@1", read_base_model(base))
    assert published.rank == 4
    assert published.canary is not None
    assert published.canary.token_ids in (ids_of(good), ids_of(bad))
    assert published.canary.logprobs == pytest.approx(every_logprob(base, target, published.canary), abs=1e-5)
    assert published.canary.base_logprobs == pytest.approx(every_logprob(base, None, published.canary), abs=1e-5)
    assert (metrics.trajectories, metrics.rows, metrics.tokens, metrics.steps) == (2, 2, 4, 1)
    assert metrics.logprob_gap_nats < 1e-5
    assert [p.name for p in tmp_path.iterdir()] == ["agent@1"]


def test_an_update_goes_on_from_its_parent(base: Path, samples: list[Sample], tmp_path: Path):
    run(base, tmp_path / "agent@1", samples)
    run(base, tmp_path / "agent@2", samples, parent=tmp_path / "agent@1")
    good = samples[0]
    assert score(base, tmp_path / "agent@2", good) > score(base, tmp_path / "agent@1", good)


def test_the_same_seed_gives_the_same_bytes(base: Path, samples: list[Sample], tmp_path: Path):
    for step in (1, 2):
        run(base, tmp_path / f"agent@{step}", samples, epochs=3, minibatches=2, seed=7)
    first, second = (load_file(tmp_path / f"agent@{step}" / "adapter_model.safetensors") for step in (1, 2))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_with_no_advantage_nothing_is_published(base: Path, samples: list[Sample], tmp_path: Path):
    with pytest.raises(TrainingError, match="scored alike"):
        run(base, tmp_path / "agent@1", [replace(s, advantage=0.0) for s in samples])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e39])
def test_a_step_that_is_not_finite_publishes_nothing(base: Path, samples: list[Sample], tmp_path: Path, poison: float):
    with pytest.raises(TrainingError, match="dropped"):
        run(base, tmp_path / "agent@1", [replace(samples[0], advantage=poison), samples[1]])
    assert list(tmp_path.iterdir()) == []


def test_a_policy_is_never_overwritten(base: Path, samples: list[Sample], tmp_path: Path):
    run(base, tmp_path / "agent@1", samples)
    before = (tmp_path / "agent@1" / "adapter_model.safetensors").read_bytes()
    with pytest.raises(AdapterRejected, match="never changes"):
        run(base, tmp_path / "agent@1", samples, seed=3)
    assert (tmp_path / "agent@1" / "adapter_model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["agent@1"]
