"""Log-probabilities and entropies of chosen tokens are those of a log-softmax, and so are the gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from art_patch.training import scoring
from art_patch.training.scoring import Head, logprobs

VOCABULARY, WIDTH = 7, 3


def make_head(**config: Any) -> Head:
    linear = torch.nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.float64)
    torch.nn.init.normal_(linear.weight, generator=torch.Generator().manual_seed(0))
    linear.requires_grad_(False)
    text_config = SimpleNamespace(**config)
    return Head(
        SimpleNamespace(
            get_output_embeddings=lambda: linear, config=SimpleNamespace(get_text_config=lambda: text_config)
        )
    )


@pytest.mark.parametrize("config", [{}, {"final_logit_softcapping": 2.0}, {"logit_scale": 0.5}])
@pytest.mark.parametrize("chunk_logits", [VOCABULARY, 2 * VOCABULARY, 1 << 20])
@given(
    chosen=st.lists(st.tuples(st.integers(0, 4), st.integers(0, VOCABULARY - 1)), min_size=1, max_size=8),
    temperatures=st.none() | st.lists(st.sampled_from([0.25, 1.0, 1.7]), min_size=5, max_size=5),
)
def test_as_a_log_softmax(
    config: dict[str, float],
    chunk_logits: int,
    chosen: list[tuple[int, int]],
    temperatures: list[float] | None,
):
    asked = make_head(**config)
    hidden_QW = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3
    place_N, target_N = (torch.tensor(each) for each in zip(*chosen, strict=True))
    temperature_Q = None if temperatures is None else torch.tensor(temperatures, dtype=torch.float64)

    def plain(hidden_QW: torch.Tensor) -> torch.Tensor:
        logit_QV = asked(hidden_QW) / (1.0 if temperature_Q is None else temperature_Q[:, None])
        return torch.log_softmax(logit_QV, -1)

    def ours(hidden_QW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return logprobs(asked, hidden_QW, temperature_Q, place_N, target_N)

    weight_N = torch.arange(1.0, len(chosen) + 1, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scoring, "CHUNK_LOGITS", chunk_logits)
        one, other = hidden_QW.clone().requires_grad_(), hidden_QW.clone().requires_grad_()
        logprob_N, entropy_N = ours(one)
        (logprob_N * weight_N).sum().backward()
    expected_QV = plain(other)
    (expected_QV[place_N, target_N] * weight_N).sum().backward()
    torch.testing.assert_close(logprob_N, expected_QV[place_N, target_N])
    torch.testing.assert_close(entropy_N, -(expected_QV.exp() * expected_QV).sum(-1)[place_N])
    torch.testing.assert_close(one.grad, other.grad)
    assert not entropy_N.requires_grad


def test_what_cannot_be_sampled_has_no_part():
    logit_QV = torch.tensor([[1.0, -torch.inf, 2.0]], dtype=torch.float64, requires_grad=True)
    logprob_N, entropy_Q = scoring._Chosen.apply(logit_QV, torch.tensor([0]), torch.tensor([2]))  # type: ignore[misc]
    logprob_N.sum().backward()
    possible = torch.distributions.Categorical(logits=torch.tensor([1.0, 2.0], dtype=torch.float64))
    torch.testing.assert_close(logprob_N[0], possible.logits[1])
    torch.testing.assert_close(entropy_Q[0], possible.entropy())
    share = possible.probs[1].item()
    torch.testing.assert_close(logit_QV.grad, torch.tensor([[share - 1, 0.0, 1 - share]], dtype=torch.float64))


@given(top=st.floats(-80, 80, width=32), below=st.floats(0.5, 40, width=32))
def test_no_log_probability_is_more_than_nothing_and_a_sure_one_is_exact(top: float, below: float):
    """The logits are rounded to single precision; what comes of them is not rounded at their size."""
    logit_QV = torch.tensor([[top, top - below, top - below]])
    logprob_N, entropy_Q = scoring._Chosen.apply(logit_QV, torch.tensor([0, 0]), torch.tensor([0, 1]))  # type: ignore[misc]
    expected_V = torch.log_softmax(logit_QV.double(), -1)[0]
    assert (logprob_N <= 0).all()
    assert entropy_Q >= 0
    torch.testing.assert_close(logprob_N.double(), expected_V[:2], rtol=2e-6, atol=2e-7)
