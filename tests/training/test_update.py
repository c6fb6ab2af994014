"""The update on a real (random, tiny) model: a policy that learns what it should, is published whole, or not at all."""

from __future__ import annotations

import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from art_patch.errors import AdapterRejected, TrainingError
from art_patch.policies import read_base_model, validate_adapter
from art_patch.training import Example, LossConfig, Pair, Sibling, TrainGroup
from art_patch.training.loop.update import update
from tests.support.train_jobs import (
    as_sampled,
    make_job,
    plain_logprobs,
    plain_model,
    random_groups,
    row,
    weights_of,
)

GOOD, BAD = row((5, 6, 7), (20, 21)), row((5, 6, 7), (30, 31))


@pytest.fixture(scope="module")
def group(base: Path) -> TrainGroup:
    model = plain_model(base)
    return TrainGroup(
        "g",
        (
            Sibling("good", Example((as_sampled(model, GOOD),), 1.0), True),
            Sibling("bad", Example((as_sampled(model, BAD),), -1.0), True),
        ),
    )


def run(base: Path, directory: Path, *groups: TrainGroup, step: int = 1, **changes: Any):
    job = make_job(base, directory / "adapters" / f"agent@{step}", groups, **changes)
    return update(job, directory / "jobs" / f"agent@{step}")


def score(base: Path, adapter: Path | None, of: Any = GOOD) -> float:
    return sum(plain_logprobs(plain_model(base, adapter), of))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


def with_advantages(group: TrainGroup, *advantages: float) -> TrainGroup:
    siblings = tuple(
        replace(each, example=replace(each.example, advantage=advantage))
        for each, advantage in zip(group.siblings, advantages, strict=True)
    )
    return replace(group, siblings=siblings)


def test_an_update_moves_the_policy_towards_the_better_answer_and_publishes_what_an_engine_accepts(
    base: Path, group: TrainGroup, tmp_path: Path
):
    metrics = run(base, tmp_path, group)
    target = tmp_path / "adapters" / "agent@1"
    assert score(base, target, GOOD) > score(base, None, GOOD)
    assert score(base, target, BAD) < score(base, None, BAD)
    published = validate_adapter(tmp_path / "adapters", "agent@1", read_base_model(base))
    assert published.rank == 4
    # Not PEFT's empty model card.
    assert names(target) == ["MANIFEST.json", "adapter_config.json", "adapter_model.safetensors"]
    assert names(tmp_path / "adapters") == ["agent@1"]
    assert metrics.logprob_gap_nats is not None
    assert metrics.logprob_gap_nats < 1e-5
    shown = asdict(metrics)
    counted = (
        "trajectories",
        "trained_rows",
        "tokens",
        "demonstrations",
        "pairs",
        "steps",
        "computed_tokens",
        "shared_ratio",
    )
    assert {name: shown[name] for name in counted} == {
        "trajectories": 2, "trained_rows": 2, "tokens": 4, "demonstrations": 0, "pairs": 0, "steps": 1,
        "computed_tokens": 5, "shared_ratio": 8 / 5,  # 3 tokens in common, and one of each answer's two
    }  # fmt: skip
    assert (metrics.stopped, metrics.why_not_shared, metrics.distinct_tokens) == (None, None, 5)
    (step,) = metrics.history
    assert step.keys() >= {
        "phase", "loss", "kl_nats", "entropy_nats", "grad_norm", "clip_fraction", "effective_share", "tokens_per_s",
    }  # fmt: skip
    assert (step["phase"], step["clip_fraction"], step["effective_share"]) == ("groups", 0.0, pytest.approx(1.0))
    assert step["kl_nats"] == pytest.approx(0.0, abs=1e-9)  # nothing has moved before the first step


def test_the_canary_is_what_a_plain_forward_says(base: Path, group: TrainGroup, tmp_path: Path):
    run(base, tmp_path, group)
    probe = validate_adapter(tmp_path / "adapters", "agent@1", read_base_model(base)).probe
    assert probe is not None
    assert probe.token_ids == GOOD.ids_T
    for adapter, logprobs in ((tmp_path / "adapters" / "agent@1", probe.logprobs), (None, probe.base_logprobs)):
        with torch.no_grad():
            logits = plain_model(base, adapter)(input_ids=torch.tensor([probe.token_ids])).logits[0]
        plain = torch.log_softmax(logits, dim=-1)
        assert logprobs == pytest.approx([plain[t, token].item() for t, token in enumerate(probe.targets)], abs=1e-5)


def test_an_update_goes_on_from_its_parent_or_begins_anew(base: Path, group: TrainGroup, tmp_path: Path):
    adapters = tmp_path / "adapters"
    run(base, tmp_path, group)
    went_on = run(base, tmp_path, group, step=2, parent=adapters / "agent@1")
    run(base, tmp_path, group, step=3, champion=adapters / "agent@1", start="base")
    assert score(base, adapters / "agent@2") > score(base, adapters / "agent@1")
    # the base's weights, and so the same update as the first
    torch.testing.assert_close(weights_of(adapters / "agent@3"), weights_of(adapters / "agent@1"), atol=0, rtol=0)
    assert went_on.logprob_gap_nats is not None
    assert went_on.logprob_gap_nats > 0.01  # the base sampled these


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(base: Path, tmp_path: Path):
    groups = random_groups(base, groups=3, siblings=3)
    for step, seed in ((1, 7), (2, 7), (3, 8)):
        run(base, tmp_path, *groups, step=step, epochs=3, minibatches=2, seed=seed)
    first, second, third = (weights_of(tmp_path / "adapters" / f"agent@{step}") for step in (1, 2, 3))
    assert first.keys() == second.keys() == third.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], third[name]) for name in first)


def test_a_group_that_teaches_nothing_changes_no_bit_and_costs_no_token(base: Path, group: TrainGroup, tmp_path: Path):
    alike = replace(with_advantages(group, 0.0, 0.0), id="alike")
    gone = TrainGroup("gone", (Sibling("x", Example((), 1.0), False), group.siblings[0]))
    gone = with_advantages(gone, 1.0, 0.0)
    alone = run(base, tmp_path, group)
    beside = run(base, tmp_path, alike, group, gone, step=2)
    first, second = (weights_of(tmp_path / "adapters" / f"agent@{step}") for step in (1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (alone.computed_tokens, alone.tokens) == (beside.computed_tokens, beside.tokens)


@pytest.mark.parametrize("advantages", [(0.0, 0.0), ()])
def test_with_nothing_to_learn_nothing_is_published(
    base: Path, group: TrainGroup, tmp_path: Path, advantages: tuple[float, ...]
):
    with pytest.raises(TrainingError, match="scored alike"):
        run(base, tmp_path, *([with_advantages(group, *advantages)] if advantages else []))
    assert names(tmp_path) == []


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e39])
def test_a_step_that_is_not_finite_drops_the_update(base: Path, group: TrainGroup, tmp_path: Path, poison: float):
    with pytest.raises(TrainingError, match="dropped and nothing published; lower --learning-rate"):
        run(base, tmp_path, with_advantages(group, poison, -1.0))
    assert (names(tmp_path / "adapters"), names(tmp_path / "jobs")) == ([], [])


def test_weights_that_are_not_finite_drop_the_update(base: Path, group: TrainGroup, tmp_path: Path):
    with pytest.raises(TrainingError, match="weight_norm inf"):
        run(base, tmp_path, group, learning_rate=1e30)
    assert (names(tmp_path / "adapters"), names(tmp_path / "jobs")) == ([], [])


def test_an_update_that_went_far_enough_ends_early_and_keeps_what_it_learned(
    base: Path, group: TrainGroup, tmp_path: Path
):
    short = run(base, tmp_path, group, epochs=2)
    assert short.history[1]["kl_nats"] > 1e-3
    stopped = run(base, tmp_path, group, step=2, epochs=50, max_kl_nats=(short.history[1]["kl_nats"] - 1e-6))
    one_step = run(base, tmp_path, group, step=3)
    assert stopped.stopped is not None
    assert "update_kl_nats" in stopped.stopped and "above max_kl_nats" in stopped.stopped
    assert (stopped.steps, one_step.steps) == (1, 1)
    second, third = (weights_of(tmp_path / "adapters" / f"agent@{step}") for step in (2, 3))
    assert all(torch.equal(second[name], third[name]) for name in second)


def test_the_share_of_clipped_tokens_ends_an_update_too(base: Path, group: TrainGroup, tmp_path: Path):
    metrics = run(base, tmp_path, group, epochs=200, max_clip_fraction=0.4, max_kl_nats=None)
    assert metrics.stopped is not None
    assert "above max_clip_fraction=0.4" in metrics.stopped
    assert all(step["clip_fraction"] <= 0.4 for step in metrics.history)


def recorded_elsewhere(group: TrainGroup, on_policy: bool = False) -> TrainGroup:
    """The same runs with log-probabilities of another policy."""
    siblings = [
        replace(each, example=Example((said,), each.example.advantage), on_policy=on_policy)
        for each, said in zip(group.siblings, (GOOD, BAD), strict=True)
    ]
    return TrainGroup("far", tuple(siblings))


def test_data_of_a_far_policy_is_refused_before_the_first_step(base: Path, group: TrainGroup, tmp_path: Path):
    far = recorded_elsewhere(group)
    with pytest.raises(TrainingError, match=r"every row was .* above max_drift_nats .*; nothing was trained"):
        run(base, tmp_path, far, max_drift_nats=0.5)
    off: dict[str, Any] = {
        "max_kl_nats": 0.5,
        "loss": LossConfig(importance_cap=None),
    }  # the ratio is that to who sampled
    with pytest.raises(TrainingError, match=r"kl_nats .* at step 1 .*raise that bound, or use newer runs"):
        run(base, tmp_path, far, **off)
    assert (names(tmp_path / "adapters"), names(tmp_path / "jobs")) == ([], [])


def test_rows_of_a_far_policy_are_left_out_and_the_others_compared_without_them(
    base: Path, group: TrainGroup, tmp_path: Path
):
    model = plain_model(base)
    others = [as_sampled(model, row((5, 6, 7), (token, 22))) for token in (23, 24)]
    good, bad = with_advantages(recorded_elsewhere(group), 1.0, -0.2).siblings
    rest = [
        Sibling(f"t{n}", Example((said,), a), True)
        for n, (said, a) in enumerate(zip(others, (-0.5, -0.3), strict=True))
    ]
    mixed = TrainGroup("mixed", (good, *rest))
    metrics = run(base, tmp_path, mixed, TrainGroup("gone", (good, bad)), max_drift_nats=0.5)
    assert (metrics.far_rows, metrics.trajectories, metrics.trained_rows) == (3, 2, 2)
    expected = TrainGroup("mixed", tuple(replace(s, example=replace(s.example, advantage=a))
                                         for s, a in zip(rest, (-0.1, 0.1), strict=True)))  # fmt: skip
    assert run(base, tmp_path, expected, step=2).far_rows == 0
    first, second = (weights_of(tmp_path / "adapters" / f"agent@{step}") for step in (1, 2))
    for name, weight in first.items():
        torch.testing.assert_close(weight, second[name], atol=1e-6, rtol=1e-5)


def test_where_the_server_computes_another_model_nothing_is_trained(base: Path, group: TrainGroup, tmp_path: Path):
    alike = run(base, tmp_path, group, max_gap_nats=0.05)
    assert alike.logprob_gap_mean_nats is not None
    assert alike.logprob_gap_mean_nats <= (alike.logprob_gap_nats or 0.0) < 1e-5
    with pytest.raises(TrainingError, match=r"nats on average, above max_gap_nats=0.05.*adapter.*dtype.*chat template"):
        run(base, tmp_path, recorded_elsewhere(group, on_policy=True), step=2, max_gap_nats=0.05)
    assert (names(tmp_path / "adapters"), names(tmp_path / "jobs")) == (["agent@1"], ["agent@1"])


def test_groups_are_compared_with_the_policy_that_demonstrations_made(base: Path, group: TrainGroup, tmp_path: Path):
    shown = row((9, 10), (40, 41, 42), logprob=0.0)
    metrics = run(base, tmp_path, group, demonstrations=(shown,), epochs=6, learning_rate=2e-2)
    first = next(step for step in metrics.history if step["phase"] == "groups")
    assert (first["clip_fraction"], first["update_kl_nats"]) == (0.0, pytest.approx(0.0, abs=1e-9))
    assert first["kl_nats"] > 1e-3  # the policy that sampled is another one by now


def test_a_policy_is_never_overwritten(base: Path, group: TrainGroup, tmp_path: Path):
    run(base, tmp_path, group)
    before = weights_of(tmp_path / "adapters" / "agent@1")
    job = make_job(base, tmp_path / "adapters" / "agent@1", [group], seed=3)
    with pytest.raises(AdapterRejected, match="never changes"):
        update(job, tmp_path / "jobs" / "other")
    after = weights_of(tmp_path / "adapters" / "agent@1")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert names(tmp_path / "adapters") == ["agent@1"]


def test_a_job_that_was_published_is_done(base: Path, group: TrainGroup, tmp_path: Path):
    first = run(base, tmp_path, group, epochs=2)
    assert run(base, tmp_path, group, epochs=2) == first
    shutil.rmtree(tmp_path / "jobs")
    with pytest.raises(AdapterRejected, match="nothing to do"):
        run(base, tmp_path, group, epochs=2)


def test_a_directory_belongs_to_one_job(base: Path, group: TrainGroup, tmp_path: Path):
    run(base, tmp_path, group)
    other = make_job(base, tmp_path / "adapters" / "agent@2", [group])
    with pytest.raises(TrainingError, match="belongs to another update; delete it"):
        update(other, tmp_path / "jobs" / "agent@1")
    assert names(tmp_path / "adapters") == ["agent@1"]


def test_demonstrations_are_imitated_before_groups_are_ranked(base: Path, group: TrainGroup, tmp_path: Path):
    shown = row((9, 10), (40, 41, 42), logprob=0.0)
    metrics = run(base, tmp_path, group, demonstrations=(shown,), epochs=2)
    target = tmp_path / "adapters" / "agent@1"
    assert [step["phase"] for step in metrics.history] == ["imitate", "imitate", "groups", "groups"]
    assert metrics.history[1]["loss"] < metrics.history[0]["loss"]
    assert metrics.history[0]["loss"] == pytest.approx(-score(base, None, shown) / 3, abs=1e-5)
    assert score(base, target, shown) > score(base, None, shown)
    assert metrics.demonstrations == 1


def test_demonstrations_alone_make_a_policy(base: Path, tmp_path: Path):
    shown = row((9, 10), (40, 41, 42), logprob=0.0)
    metrics = run(base, tmp_path, demonstrations=(shown, row((9, 11), (43,), logprob=0.0)), epochs=2, minibatches=2)
    assert (metrics.steps, metrics.tokens, metrics.logprob_gap_nats) == (4, 0, None)
    assert score(base, tmp_path / "adapters" / "agent@1", shown) > score(base, None, shown)


def test_pairs_are_told_apart(base: Path, tmp_path: Path):
    chosen, rejected = (replace(each, logprobs_T=(0.0,) * len(each.ids_T)) for each in (GOOD, BAD))
    metrics = run(base, tmp_path, pairs=(Pair(chosen, rejected, "correction"),), epochs=3)
    target = tmp_path / "adapters" / "agent@1"
    moved = score(base, target, GOOD) - score(base, None, GOOD) - score(base, target, BAD) + score(base, None, BAD)
    assert moved > 0.1
    first, *_, last = metrics.history
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)  # model and reference are the same
    assert (first["margin"], last["right_share"]) == (pytest.approx(0.0, abs=1e-6), 1.0)
    assert last["loss"] < first["loss"]


def test_a_reference_holds_the_policy_near(base: Path, group: TrainGroup, tmp_path: Path):
    free = run(base, tmp_path, group, epochs=12)
    held = run(base, tmp_path, group, step=2, epochs=12, loss=LossConfig(kl_coefficient=1.0))
    assert 0 < held.reference_kl_nats < free.kl_nats
    assert abs(score(base, tmp_path / "adapters" / "agent@2") - score(base, None)) < abs(
        score(base, tmp_path / "adapters" / "agent@1") - score(base, None)
    )


@pytest.mark.parametrize(("reference", "start"), [("base", "champion"), ("champion", "champion"), ("champion", "base")])
def test_the_reference_is_the_policy_that_was_asked_for(
    base: Path, group: TrainGroup, tmp_path: Path, reference: str, start: str
):
    adapters = tmp_path / "adapters"
    run(base, tmp_path, group, epochs=8)
    metrics = run(
        base, tmp_path, group, step=2, parent=adapters / "agent@1" if start == "champion" else None,
        champion=adapters / "agent@1", reference=reference, start=start,
        loss=LossConfig(kl_coefficient=0.1), max_kl_nats=None,
    )  # fmt: skip
    of_reference = plain_model(base, adapters / "agent@1" if reference == "champion" else None)
    of_start = plain_model(base, adapters / "agent@1" if start == "champion" else None)
    theirs, ours = (
        [value for said in (GOOD, BAD) for value in plain_logprobs(m, said)] for m in (of_reference, of_start)
    )
    apart = [r - s for r, s in zip(theirs, ours, strict=True)]
    k3 = sum(math.expm1(each) - each for each in apart) / len(apart)
    assert metrics.history[0]["reference_kl_nats"] == pytest.approx(k3, abs=1e-5)
    published = validate_adapter(adapters, "agent@2", read_base_model(base))  # the reference's weights are not in it
    assert published.modules


def test_siblings_with_no_advantage_are_computed_only_if_they_are_held_near(
    base: Path, group: TrainGroup, tmp_path: Path
):
    third = Sibling("even", Example((as_sampled(plain_model(base), row((5, 6, 7), (50, 51, 52))),), 0.0), True)
    three = replace(group, siblings=(*group.siblings, third))
    without = run(base, tmp_path, three)
    held = run(base, tmp_path, three, step=2, loss=LossConfig(kl_coefficient=0.1))
    alone = run(base, tmp_path, group, step=3)
    assert (without.computed_tokens, held.computed_tokens, alone.computed_tokens) == (5, 7, 5)
    assert (without.tokens, held.tokens) == (4, 4)
    # its three tokens are in the normaliser
    assert without.grad_norm == pytest.approx(alone.grad_norm * 4 / 7, rel=1e-4)


def test_progress_says_how_it_goes(base: Path, group: TrainGroup, tmp_path: Path):
    said: list[tuple[int, int, str]] = []
    job = make_job(base, tmp_path / "adapters" / "agent@1", [group], epochs=2, mean_reward=0.5)
    update(job, tmp_path / "job", progress=lambda *at: said.append(at))
    assert [at[:2] for at in said] == [(0, 2), (1, 2), (2, 2)]
    assert said[0][2] == "loading the base model"
    assert all(word in said[1][2] for word in ("reward +0.50", "loss ", "KL 0.00", "tokens/s", "s left"))
