"""The gradient of a step depends on what is learned, not on how it is cut up."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from art_patch.training import Example, LossConfig, Pair, Row, Sibling, TrainGroup, TrainJob
from art_patch.training.loop.gradients import StartScores, Sums, gradients_of, start_scores
from art_patch.training.loop.job import PhaseName
from art_patch.training.loop.loading import as_reference, load_policy
from art_patch.training.loop.processes import ALONE, Ranks
from art_patch.training.loss_config import LOSSES
from art_patch.training.scoring import Scorer
from tests.support.tiny import make_tiny_adapter
from tests.support.train_jobs import SMALL, make_job, plain_logprobs, random_groups, row, trainable

Kind = PhaseName | Literal["rehearse"]


class Bench:
    """A model in fp64, its gradients, and the scores of a policy near it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.scorer = Scorer(model)

    def start(self, job: TrainJob, directory: Path) -> StartScores:
        """Old log-probabilities that differ from the model's, so that clips and ratios are at work."""
        start = start_scores(job, self.model, self.scorer, directory, ALONE)
        generator = torch.Generator().manual_seed(3)

        def off(each: torch.Tensor) -> torch.Tensor:
            return each + 0.2 * torch.randn(each.shape, generator=generator, dtype=each.dtype)

        reference = None if start.reference is None else tuple(map(off, start.reference))
        return replace(start, old=tuple(map(off, start.old)), reference=reference, pairs=tuple(map(off, start.pairs)))

    def gradient(
        self, job: TrainJob, start: StartScores, phase: Kind, items: list[int], ranks: Ranks = ALONE
    ) -> tuple[dict[str, torch.Tensor], Sums]:
        self.model.zero_grad(set_to_none=True)
        sums = gradients_of(job, self.scorer, start, ranks)[phase](items)
        return {n: w.grad.clone() for n, w in self.model.named_parameters() if w.grad is not None}, sums


@pytest.fixture(scope="module")
def bench(base: Path) -> Bench:
    return Bench(trainable(base))


@pytest.fixture(scope="module")
def groups(base: Path) -> tuple[TrainGroup, ...]:
    *runs, last = random_groups(base, groups=4, siblings=4)
    return (*runs, replace(last, kind="turn"))  # so that tokens have different weights


def require_equal(
    one: tuple[dict[str, torch.Tensor], Sums], other: tuple[dict[str, torch.Tensor], Sums], *, but: tuple[str, ...] = ()
) -> None:
    assert one[0].keys() == other[0].keys()
    for name in one[0]:
        torch.testing.assert_close(one[0][name], other[0][name], atol=1e-6, rtol=1e-5)
    without = [{name: value for name, value in sums.items() if name not in but} for _, sums in (one, other)]
    assert without[0] == pytest.approx(without[1], rel=1e-5, abs=1e-6)


CUT = ("computed_tokens", "distinct_tokens")
"""What is in common is computed again in another pack."""


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_micro_batches_and_the_order_of_groups_change_no_gradient(
    bench: Bench, base: Path, groups: tuple[TrainGroup, ...], tmp_path: Path, loss: Any
):
    config = LossConfig(name=loss, kl_coefficient=0.05)
    job = make_job(base, tmp_path / "agent@1", groups, loss=config)
    start = bench.start(job, tmp_path)
    whole = bench.gradient(job, start, "groups", [0, 1, 2, 3])
    for tokens in (1, 60, 120):
        cut = replace(job, config=replace(job.config, micro_batch_tokens=tokens))
        require_equal(bench.gradient(cut, start, "groups", [0, 1, 2, 3]), whole, but=CUT)
    require_equal(bench.gradient(job, start, "groups", [2, 0, 3, 1]), whole)
    for batch in (1, 2, 3):  # accumulated batches of unlike lengths: a mean over all tokens, not of means
        accumulating = replace(job.config, batch_size=batch, gradient_accumulation_steps=4)
        require_equal(bench.gradient(replace(job, config=accumulating), start, "groups", [0, 1, 2, 3]), whole, but=CUT)


def test_no_more_than_a_batch_is_computed_at_once(
    bench: Bench, base: Path, groups: tuple[TrainGroup, ...], tmp_path: Path
):
    job = make_job(base, tmp_path / "agent@1", [groups[0]] * 4, batch_size=2)
    start = bench.start(job, tmp_path)
    one, two, four = (
        bench.gradient(
            replace(job, config=replace(job.config, gradient_accumulation_steps=steps)), start, "groups", items
        )[1]["computed_tokens"]
        for steps, items in ((1, [0]), (2, [0, 1, 2, 3]), (1, [0, 1, 2, 3]))
    )
    assert (two, four) == (2 * one, one)  # what is alike is computed once in each batch


@pytest.mark.parametrize("size", [2, 3, 5])
def test_what_processes_compute_adds_up(
    bench: Bench, base: Path, groups: tuple[TrainGroup, ...], tmp_path: Path, size: int
):
    shown, pairs = given_rows()
    job = make_job(base, tmp_path / "agent@1", groups, demonstrations=shown, pairs=pairs, rehearse_from=0.5)
    start = bench.start(job, tmp_path)
    kinds = ("groups", [0, 1, 2, 3]), ("imitate", [1, 0, 2]), ("rehearse", [0, 2]), ("prefer", [1, 0])
    for phase, items in kinds:
        whole = bench.gradient(job, start, phase, items)
        parts = [bench.gradient(job, start, phase, items, Ranks(rank, size)) for rank in range(size)]
        summed = {
            name: torch.stack([part[0].get(name, torch.zeros_like(grad)) for part in parts]).sum(0)
            for name, grad in whole[0].items()
        }
        sums = {name: math.fsum(part[1][name] for part in parts) for name in whole[1]}
        require_equal((summed, sums), whole, but=CUT)


def given_rows() -> tuple[tuple[Row, ...], tuple[Pair, ...]]:
    shown = tuple(row((9, 10), (40, 41, 42)[: n + 1], logprob=0.0) for n in range(3))
    pairs = (
        Pair(row((5, 6), (7, 8, 9)), row((5, 6), (10,)), "correction"),
        Pair(row((50, 6), (7,)), row((50, 6), (10, 11)), "group"),
    )
    return shown, pairs


@pytest.mark.parametrize("phase", ["imitate", "prefer", "rehearse"])
def test_micro_batches_change_no_gradient_of_given_answers(bench: Bench, base: Path, tmp_path: Path, phase: Kind):
    shown, pairs = given_rows()
    job = make_job(base, tmp_path / "agent@1", (), demonstrations=shown, pairs=pairs, rehearse_from=0.5)
    start = bench.start(job, tmp_path)
    items = list(range(2 if phase == "prefer" else 3))
    whole = bench.gradient(job, start, phase, items)
    for changes in ({"micro_batch_tokens": 1}, {"batch_size": 1, "gradient_accumulation_steps": 3}):
        cut = replace(job, config=replace(job.config, **changes))
        require_equal(bench.gradient(cut, start, phase, items), whole, but=CUT)
    require_equal(bench.gradient(job, start, phase, items[::-1]), whole)


def test_what_is_rehearsed_has_the_gradient_of_a_plain_likelihood_times_its_weight(
    bench: Bench, base: Path, tmp_path: Path
):
    earlier = tuple(row((9, n), (40, 41, 42 + n), temperature=0.5 + n / 4, logprob=0.0) for n in range(4))
    job = make_job(base, tmp_path / "agent@1", (), rehearsal=earlier, rehearse_from=0.5, rehearse_weight=0.3)
    found, sums = bench.gradient(job, bench.start(job, tmp_path), "rehearse", [1, 3])
    plain, losses = trainable(base), []
    for said in (earlier[1], earlier[3]):
        logits = plain(input_ids=torch.tensor([said.ids_T])).logits[0]
        losses += [
            -torch.log_softmax(logits[t - 1] / said.temperature_T[t], -1)[said.ids_T[t]]
            for t in range(len(said.ids_T))
            if said.sampled_T[t]
        ]
    nll = torch.stack(losses).mean()
    (0.3 * nll).backward()
    for name, weight in plain.named_parameters():
        if weight.requires_grad:
            torch.testing.assert_close(found[name], weight.grad, atol=1e-6, rtol=1e-5)
    assert (sums["tokens"], sums["nll_nats"] / 6) == (6, pytest.approx(nll.item(), rel=1e-6))


def test_the_sums_of_pairs_are_those_of_plain_forwards(bench: Bench, base: Path, tmp_path: Path):
    _, pairs = given_rows()
    job = make_job(base, tmp_path / "agent@1", (), pairs=pairs)
    start = bench.start(job, tmp_path)
    _, sums = bench.gradient(job, start, "prefer", [1, 0])
    margins: list[float] = []
    for pair, known in zip(pairs, start.pairs, strict=True):
        own = [sum(plain_logprobs(Apart(bench), each)) for each in (pair.chosen, pair.rejected)]
        old = [known[: pair.chosen.sampled].sum().item(), known[pair.chosen.sampled :].sum().item()]
        margins.append(0.1 * (own[0] - old[0] - own[1] + old[1]))
    assert sums["margin"] == pytest.approx(sum(margins), abs=1e-5)
    assert sums["loss"] == pytest.approx(sum(math.log1p(math.exp(-m)) for m in margins) / 2, abs=1e-6)


class Apart:
    """The bench's model as `plain_logprobs` asks it: log-probabilities for logits, which is the same to it."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def __call__(self, input_ids: torch.Tensor) -> Any:
        class Output:
            logits = self._bench.scorer.next_TV(input_ids[0].tolist())[None]

        return Output


def test_a_prompt_or_tool_token_is_never_a_target_and_a_sampled_one_always_is(bench: Bench, base: Path, tmp_path: Path):
    ids, sampled = (5, 6, 7, 8, 9, 10), (False, False, True, True, False, True)

    def gradient(number: int, *ids: int) -> dict[str, torch.Tensor]:
        whole = Row(
            ids, sampled[: len(ids)] + (False,) * (len(ids) - len(sampled)), (-1.0,) * len(ids), (1.0,) * len(ids)
        )
        group = TrainGroup("g", (Sibling("t", Example((whole,), 1.0), True),))
        job = make_job(base, tmp_path / "agent@1", [group], loss=LossConfig(name="cispo"))
        start = start_scores(job, bench.model, bench.scorer, tmp_path / str(number), ALONE)
        return bench.gradient(job, start, "groups", [0])[0]

    reference = gradient(0, *ids)
    after = [gradient(1, *ids, 50), gradient(2, *ids, 51)]  # nothing is predicted from there
    for name, grad in reference.items():
        assert all(torch.equal(grad, each[name]) for each in after)
    other = gradient(3, *ids[:-1], 77)
    assert any(not torch.equal(reference[name], grad) for name, grad in other.items())


def test_turns_apart_have_the_gradient_of_the_conversation(bench: Bench, base: Path, tmp_path: Path):
    both = row((5, 6), (7, 8)), row((5, 6, 7, 8, 9), (10,))
    whole = Row(both[1].ids_T, (False, False, True, True, False, True), (0, 0, -1.0, -1.0, 0, -1.0), (1.0,) * 6)
    found: list[tuple[dict[str, torch.Tensor], Sums]] = []
    for number, rows in enumerate(((whole,), both)):
        group = TrainGroup("g", (Sibling("t", Example(rows, 1.0), True),))
        job = make_job(base, tmp_path / "agent@1", [group], loss=LossConfig(name="gspo"))
        start = start_scores(job, bench.model, bench.scorer, tmp_path / str(number), ALONE)
        found.append(bench.gradient(job, start, "groups", [0]))
    require_equal(*found, but=("row_tokens",))


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.permutations(range(4)), st.integers(1, 200), st.data())
def test_any_cut_of_any_order_gives_one_gradient(
    bench: Bench, base: Path, groups: tuple[TrainGroup, ...], tmp_path: Path, order: list[int], tokens: int, data: Any
):
    size = data.draw(st.integers(1, 3))
    job = make_job(base, tmp_path / "agent@1", groups)
    start = bench.start(job, tmp_path)
    whole = bench.gradient(job, start, "groups", [0, 1, 2, 3])
    cut = replace(job, config=replace(job.config, micro_batch_tokens=tokens))
    parts = [bench.gradient(cut, start, "groups", order, Ranks(rank, size)) for rank in range(size)]
    summed = {
        name: torch.stack([part[0].get(name, torch.zeros_like(grad)) for part in parts]).sum(0)
        for name, grad in whole[0].items()
    }
    require_equal((summed, {}), (whole[0], {}))


def test_recomputing_blocks_changes_no_gradient(base: Path, groups: tuple[TrainGroup, ...], tmp_path: Path):
    found: list[tuple[dict[str, torch.Tensor], Sums]] = []
    for number, recompute in enumerate((False, True)):
        bench = Bench(trainable(base, replace(SMALL, gradient_checkpointing=recompute)))
        job = make_job(base, tmp_path / "agent@1", groups)
        found.append(bench.gradient(job, bench.start(job, tmp_path / str(number)), "groups", [0, 1, 2, 3]))
    one, two = found
    assert all(torch.equal(one[0][name], two[0][name]) for name in one[0])
    assert one[1] == two[1]


def test_recomputing_blocks_keeps_no_activations_of_them(base: Path, groups: tuple[TrainGroup, ...], tmp_path: Path):
    kept: list[int] = []
    adapter = make_tiny_adapter(tmp_path, base)
    for recompute in (False, True):
        model = load_policy(str(base), None, replace(SMALL, gradient_checkpointing=recompute))
        with as_reference(model, adapter):  # a reference in between is no reason to begin
            pass
        scorer, sizes = Scorer(model), [0]

        def pack(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes[0] += tensor.numel()
            return tensor

        packs = ALONE.shard([s.example for s in groups[0].siblings], 10_000)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            scorer.score(packs[0])
        kept += sizes
    assert kept[1] < kept[0] / 2
