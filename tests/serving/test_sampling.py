"""The sampler against distributions worked out by hand."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from art_patch.serving.embedded.cohort import Sampler
from art_patch.serving.embedded.generation import SamplingParams

LOGITS = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))


def draw(params: SamplingParams, rows: int = 1, noise: torch.Generator | None = None) -> tuple[list[int], list[float]]:
    noises = [noise] + [None] * (rows - 1)
    return Sampler([params] * rows, noises, torch.device("cpu")).sample(LOGITS.repeat(rows, 1))


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), [0.5, 0.3, 0.15, 0.05]),
        (SamplingParams(temperature=2.0), [0.3790, 0.2936, 0.2076, 0.1199]),  # sqrt(p), normalised
        (SamplingParams(top_p=0.8), [0.625, 0.375, 0, 0]),
        (SamplingParams(top_p=0.81), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        (SamplingParams(top_p=1e-9), [1, 0, 0, 0]),
        (SamplingParams(temperature=0.0), [1, 0, 0, 0]),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(params: SamplingParams, expected: list[float]) -> None:
    torch.manual_seed(0)
    counts = Counter(draw(params, rows=40_000)[0])
    assert [counts[token] / 40_000 for token in range(4)] == pytest.approx(expected, abs=0.01)


def test_logprobs_are_before_the_top_p_cut_and_at_the_temperature() -> None:
    (token,), (logprob,) = draw(SamplingParams(temperature=2.0, top_p=0.1))
    assert (token, logprob) == (0, pytest.approx(torch.log_softmax(LOGITS / 2, 0)[0].item()))
    (token,), (logprob,) = draw(SamplingParams(temperature=0.0))
    assert (token, logprob) == (0, pytest.approx(LOGITS[0].item()))


def test_a_seeded_row_ignores_its_neighbours() -> None:
    alone = [draw(SamplingParams(), 1, torch.Generator().manual_seed(seed))[0][0] for seed in range(50)]
    among = [draw(SamplingParams(), 9, torch.Generator().manual_seed(seed))[0][0] for seed in range(50)]
    assert alone == among
    assert len(set(alone)) > 1


def test_rows_of_every_kind_share_a_batch() -> None:
    kinds = [SamplingParams(temperature=0.0), SamplingParams(top_p=0.4), SamplingParams(temperature=1e-6)]
    ids, logprobs = Sampler(kinds, [None] * 3, torch.device("cpu")).sample(LOGITS.repeat(3, 1))
    assert ids == [0, 0, 0]
    assert logprobs == pytest.approx([LOGITS[0].item()] * 3)


def test_nan_shows_in_the_logprob_of_its_row_alone() -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 2] = float("nan")
    _, logprobs = Sampler([SamplingParams()] * 3, [None] * 3, torch.device("cpu")).sample(logits)
    assert [logprob == logprob for logprob in logprobs] == [True, False, True]
