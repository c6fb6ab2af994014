"""Advantages, rows and the loss against numbers worked out by hand and a second implementation."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from art_patch.records import Choice
from art_patch.training.advantages import advantages_G
from art_patch.training.loss import LossInput, grpo_loss
from art_patch.training.rows import rows_of
from tests.factory import make_call, make_trajectory

# advantages


def test_advantages_are_the_z_score_with_ddof_1():
    # mean 0.5, deviations (.5, -.5, .5, -.5), std sqrt(1/3)
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert advantages_G([1, 0, 1, 0]) == pytest.approx((expected, -expected, expected, -expected))


@pytest.mark.parametrize("rewards", [[], [1.0], [0.1, 0.1, 0.1], [0.0, 0.0], [None, 0.5], [math.nan, 1.0], [1.0, None]])
def test_what_has_no_spread_teaches_nothing(rewards: list[float | None]):
    assert advantages_G(rewards) is None


def test_an_unscored_sibling_has_no_advantage_and_does_not_move_the_others():
    scored = advantages_G([1.0, 0.0])
    assert scored is not None
    assert advantages_G([1.0, None, 0.0, math.nan]) == (scored[0], 0.0, scored[1], 0.0)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=20))
def test_advantages_sum_to_nothing_and_keep_the_order(rewards: list[float]):
    advantages = advantages_G(rewards)
    if advantages is not None:
        assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-6)
        for (r1, a1), (r2, a2) in itertools.combinations(zip(rewards, advantages, strict=True), 2):
            assert (r1 < r2) <= (a1 <= a2)


# rows


def turn(key: str, prompt: tuple[int, ...], answer: tuple[int, ...], **changes):
    return make_call(key, prompt=prompt, answer=answer, **changes)


def test_a_conversation_that_extends_itself_is_one_row_and_each_sampled_token_is_in_it_once():
    trajectory = make_trajectory("t", turn("a", (1, 2), (3, 4)), turn("b", (1, 2, 3, 4, 5, 6), (7,)))
    (row,) = rows_of(trajectory, max_tokens=100)
    assert row.ids_T == (1, 2, 3, 4, 5, 6, 7)
    assert row.sampled_T == (False, False, True, True, False, False, True)
    assert row.logprobs_T == (0, 0, -0.5, -0.5, 0, 0, -0.5)


def test_a_rewritten_history_starts_a_row_of_its_own():
    trajectory = make_trajectory("t", turn("a", (1, 2), (3, 4)), turn("b", (1, 2, 9, 4, 5), (7,)))
    assert [row.ids_T for row in rows_of(trajectory, max_tokens=100)] == [(1, 2, 3, 4), (1, 2, 9, 4, 5, 7)]


def test_parallel_branches_each_extend_their_own_row():
    trajectory = make_trajectory(
        "t", turn("a", (1,), (2,)), turn("b", (5,), (6,)), turn("a2", (1, 2, 3), (4,)), turn("b2", (5, 6, 7), (8,))
    )
    assert sorted(row.ids_T for row in rows_of(trajectory, max_tokens=100)) == [(1, 2, 3, 4), (5, 6, 7, 8)]


def test_the_same_prompt_asked_twice_is_two_rows():
    trajectory = make_trajectory("t", turn("a", (1, 2), (3,)), turn("b", (1, 2), (4,)))
    assert [row.ids_T for row in rows_of(trajectory, max_tokens=100)] == [(1, 2, 3), (1, 2, 4)]


def test_what_upstream_answered_is_context_but_never_trained():
    trajectory = make_trajectory(
        "t", turn("a", (1, 2), (3,), untrainable="answered by upstream"), turn("b", (1, 2, 3, 4), (5,))
    )
    (row,) = rows_of(trajectory, max_tokens=100)
    assert row.sampled_T == (False, False, False, False, True)


def test_of_several_choices_the_one_that_the_app_went_on_with_is_trained():
    first = make_call("a", prompt=(1,))
    choices = tuple(Choice(n, {"role": "assistant", "content": f"c{n}"}, "stop", (10 + n,), (-0.1,)) for n in range(3))
    first = make_call("a", prompt=(1,), choices=choices)
    after = make_call("b", prompt=(1, 12, 4), answer=(5,), messages=(*first.messages, choices[2].message))
    (row,) = rows_of(make_trajectory("t", first, after), max_tokens=100)
    assert row.ids_T == (1, 12, 4, 5)
    (alone,) = rows_of(make_trajectory("t", first), max_tokens=100)
    assert alone.ids_T == (1, 10)


def test_an_over_long_row_is_cut_and_one_with_nothing_sampled_left_is_gone():
    trajectory = make_trajectory("t", turn("a", (1, 2, 3), (4, 5, 6)))
    assert [row.ids_T for row in rows_of(trajectory, max_tokens=4)] == [(1, 2, 3, 4)]
    assert rows_of(trajectory, max_tokens=3) == ()


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), min_size=1, max_size=6), st.lists(st.integers(0, 3), min_size=1, max_size=3)
        ),
        max_size=6,
    )
)
def test_every_sampled_token_is_in_exactly_one_row(calls: list[tuple[list[int], list[int]]]):
    trajectory = (
        make_trajectory("t", *(turn(str(n), tuple(p), tuple(a)) for n, (p, a) in enumerate(calls))) if calls else None
    )
    if trajectory is None:
        return
    rows = rows_of(trajectory, max_tokens=1_000)
    assert sum(row.sampled for row in rows) == sum(len(answer) for _, answer in calls)
    for prompt, answer in calls:
        assert any(row.ids_T[: len(prompt) + len(answer)] == (*prompt, *answer) for row in rows)


# loss


def loss_of(logprob: torch.Tensor, recorded: torch.Tensor, advantage: torch.Tensor, tokens: int | None = None):
    return grpo_loss(LossInput(logprob, recorded, advantage, tokens or len(logprob), 0.2, 0.28))


def test_on_policy_the_loss_is_minus_the_mean_advantage_and_nothing_is_clipped():
    logprob = torch.tensor([-0.5, -1.0, -2.0], dtype=torch.float64)
    loss, metrics = loss_of(logprob, logprob, torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64))
    assert loss.item() == pytest.approx(0.0)
    assert metrics.kl_nats == 0.0
    assert metrics.clipped == 0


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected_loss", "flows"),
    [
        (1.5, 1.0, -1.28, False),  # already likelier than allowed: clipped, no gradient
        (1.5, -1.0, 1.5, True),  # a bad token that became likelier: never clipped
        (0.5, 1.0, -0.5, True),  # a good token that became less likely: never clipped
        (0.5, -1.0, 0.8, False),  # already pushed down far enough
        (1.2, 1.0, -1.2, True),
        (0.9, -1.0, 0.9, True),
    ],
)
def test_clipping_by_hand(ratio: float, advantage: float, expected_loss: float, flows: bool):
    logprob = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    loss, metrics = loss_of(
        logprob, torch.zeros(1, dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    )
    loss.backward()
    assert logprob.grad is not None
    assert loss.item() == pytest.approx(expected_loss)
    assert bool(logprob.grad.item()) is flows
    assert metrics.clipped == (not flows)
    if flows:
        assert logprob.grad.item() == pytest.approx(-advantage * ratio)


def test_the_gradient_of_a_bandit_is_advantage_times_onehot_minus_p():
    logits = torch.tensor([0.3, -0.2, 1.1], dtype=torch.float64, requires_grad=True)
    logprob = torch.log_softmax(logits, 0)[[1]]
    loss, _ = loss_of(logprob, logprob.detach(), torch.tensor([2.0], dtype=torch.float64))
    loss.backward()
    expected = -2.0 * (torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64) - torch.softmax(logits.detach(), 0))
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, expected)


def test_the_loss_agrees_with_finite_differences():
    torch.manual_seed(0)
    recorded = torch.randn(20, dtype=torch.float64) * 0.1 - 1
    advantage = torch.randn(20, dtype=torch.float64)
    logprob = (recorded + torch.randn(20, dtype=torch.float64) * 0.3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss_of(x, recorded, advantage)[0], (logprob,))


@given(st.integers(1, 5), st.randoms())
def test_micro_batches_add_up_to_the_whole(parts: int, rng):
    torch.manual_seed(rng.randrange(2**31))
    logprob, recorded, advantage = (torch.randn(12, dtype=torch.float64) for _ in range(3))
    whole, _ = loss_of(logprob, recorded, advantage)
    pieces = [
        loss_of(a, b, c, tokens=12)[0]
        for a, b, c in zip(logprob.chunk(parts), recorded.chunk(parts), advantage.chunk(parts), strict=True)
    ]
    assert sum(piece.item() for piece in pieces) == pytest.approx(whole.item())
