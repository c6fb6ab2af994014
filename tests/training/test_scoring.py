"""A pack is scored as its rows are one by one: log-probabilities and gradients, for every make of model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from art_patch.training import Example, Row, scoring
from art_patch.training.data.packing import packs_of
from art_patch.training.loop.loading import fuse
from art_patch.training.scoring import Scorer
from tests.support.families import CONFIGS, SEEING, logits_of, make_model, make_model_that_sees, with_lora
from tests.support.flash_stand_in import as_on_cuda

APART = {
    "gemma2": "Unsupported: Gemma2Attention asks for softcap",
    **dict.fromkeys(("qwen3_next", "qwen3_5"), "sharing changed log-probabilities"),  # linear attention has a state
}
"""Models that are asked row by row, and why."""


def row(*parts: tuple[Sequence[int], bool], temperature: float = 1.0) -> Row:
    ids = tuple(token for tokens, _ in parts for token in tokens)
    sampled = tuple(mine for tokens, mine in parts for _ in tokens)
    return Row(ids, sampled, (0.0,) * len(ids), tuple(temperature if mine else 1.0 for mine in sampled))


PROMPT = [3, 9, 27, 17, 51, 25, 11, 33, 40, 41, 42]
EXAMPLES = [
    # two turns with a tool's answer between, and a fork: what a sub-agent or a rewritten history makes
    Example(
        (row((PROMPT, False), ([5, 6], True), ([7, 8], False), ([9], True)), row((PROMPT[:4], False), ([5], True)))
    ),
    Example((row((PROMPT, False), ([5, 6], True), ([7, 9], False), ([9, 4], True), ([50, 51], False)),), 2.0),
    Example((row((PROMPT, False), ([5, 6], True), temperature=0.7),), -1.0),
    Example((row((PROMPT, False), ([5, 6], True)),), 0.5),
    Example((row(([12, 13], False), ([14], True)),), 1.0),
]


def tuned_model(model_type: str) -> Any:
    return with_lora((make_model_that_sees if model_type in SEEING else make_model)(model_type))


def outcome(
    scorer: Scorer, model: Any, examples: Sequence[Example] = EXAMPLES, tokens: int = 1 << 20
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities of all sampled tokens, and the gradient of a sum in which each has a weight of its own."""
    model.zero_grad(set_to_none=True)
    found: list[torch.Tensor] = []
    for pack in packs_of(examples, tokens):
        logprob_N = scorer.score(pack).logprob_N
        weights = 1 + 0.1 * torch.from_numpy(pack.target_N) + torch.from_numpy(pack.examples_E[pack.example_N])
        (logprob_N * weights).sum().backward()
        found.append(logprob_N.detach())
    return torch.cat(found), {name: w.grad.clone() for name, w in model.named_parameters() if w.grad is not None}


def assert_same(one: tuple[Any, Any], other: tuple[Any, Any], tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(one[0], other[0], atol=tolerance, rtol=tolerance)
    assert one[1].keys() == other[1].keys()
    assert one[1]
    for name, gradient in other[1].items():
        assert (one[1][name] - gradient).norm() <= tolerance * gradient.norm(), name


def expected_logprobs(model: Any, examples: Sequence[Example]) -> torch.Tensor:
    """The plain way: all logits of one row."""
    found: list[torch.Tensor] = []
    for each in (each for example in examples for each in example.rows):
        with torch.no_grad():
            logits = logits_of(model, torch.tensor([each.ids_T]))[0].double()
        for t in (t for t, sampled in enumerate(each.sampled_T) if sampled):
            found.append(torch.log_softmax(logits[t - 1] / each.temperature_T[t], -1)[each.ids_T[t]])
    return torch.stack(found)


@pytest.mark.parametrize("model_type", [*CONFIGS, *SEEING])
def test_packed_is_as_one_by_one(model_type: str):
    plain, packed = tuned_model(model_type), tuned_model(model_type)
    expected = expected_logprobs(plain, EXAMPLES)
    apart = outcome(Scorer(plain, share=False), plain)
    torch.testing.assert_close(apart[0].double(), expected, atol=1e-5, rtol=1e-5)
    scorer = Scorer(packed)
    why = scorer.why_apart
    assert (why or "").startswith(APART.get(model_type, "")) and scorer.shares == (model_type not in APART), why
    assert_same(outcome(scorer, packed), apart)
    fuse(packed)
    assert_same(outcome(scorer, packed), apart)


@pytest.mark.parametrize("model_type", ["qwen3", "mistral", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_packed_is_as_one_by_one_as_on_cuda(model_type: str):
    """Windows, sinks, and values of another width, in whole models."""
    plain, packed = tuned_model(model_type), tuned_model(model_type)
    apart = outcome(Scorer(plain, share=False), plain)
    with as_on_cuda():
        scorer = Scorer(packed)
        assert scorer.shares, scorer.why_apart
        assert_same(outcome(scorer, packed), apart)


@pytest.mark.parametrize("chunk", [4, 16])
def test_a_model_whose_attention_is_cut_into_chunks_is_found_out(chunk: int):
    """Llama 4 says so in its mask alone, which sharing does without. The shorter chunk shows when it is loaded."""
    model = with_lora(make_model("llama4_text", attention_chunk_size=chunk, head_dim=8, num_local_experts=2))
    scorer = Scorer(model)
    assert scorer.shares == (chunk == 16)
    longer = Example((row((PROMPT, False), (range(20, 30), True)),))
    scorer.prove([*EXAMPLES, longer])
    assert scorer.why_apart is not None and "sharing changed log-probabilities" in scorer.why_apart
    plain = with_lora(make_model("llama4_text", attention_chunk_size=chunk, head_dim=8, num_local_experts=2))
    torch.testing.assert_close(
        outcome(scorer, model, [longer])[0].double(), expected_logprobs(plain, [longer]), atol=1e-5, rtol=1e-5
    )


@pytest.fixture(scope="module")
def model() -> Any:
    model = tuned_model("qwen3")
    fuse(model)
    return model


@pytest.fixture(scope="module")
def scorer(model: Any) -> Scorer:
    return Scorer(model)


@pytest.mark.parametrize("tokens", [1, 20, 30])
def test_packs_of_any_size_add_up(model: Any, scorer: Scorer, tokens: int):
    assert_same(outcome(scorer, model, tokens=tokens), outcome(scorer, model))


def test_a_prompt_or_tool_token_is_never_a_target_and_a_sampled_one_always_is(model: Any, scorer: Scorer):
    example = EXAMPLES[1]
    (whole,) = example.rows
    reference = outcome(scorer, model, [example])
    for t, sampled in enumerate(whole.sampled_T):
        if sampled:  # the same context, another target
            other = replace(whole, ids_T=(*whole.ids_T[:t], 60), sampled_T=whole.sampled_T[: t + 1])
            same = replace(whole, ids_T=whole.ids_T[: t + 1], sampled_T=whole.sampled_T[: t + 1])
            found, kept = (outcome(scorer, model, [Example((each,))])[0] for each in (other, same))
            assert torch.equal(found[:-1], kept[:-1])
            assert found[-1] != kept[-1]
    last = max(t for t, sampled in enumerate(whole.sampled_T) if sampled)
    after = replace(whole, ids_T=(*whole.ids_T[: last + 1], 60, 61))
    assert_same(outcome(scorer, model, [Example((after,))]), reference, 0.0)


def test_siblings_do_not_see_each_other(model: Any, scorer: Scorer):
    one = EXAMPLES[1]
    found = [
        outcome(scorer, model, [one, Example((row((PROMPT, False), (tokens, True)),))])[0][: one.sampled]
        for tokens in ([20, 21, 22], [20, 30, 31])
    ]
    assert torch.equal(*found)


def test_identical_twins_both_count(model: Any, scorer: Scorer):
    twins = [EXAMPLES[3], EXAMPLES[3]]
    (pack,) = packs_of(twins, 1 << 20)
    assert (pack.tokens, len(pack.at_Q), len(pack.target_N)) == (len(PROMPT) + 1, 2, 4)
    assert_same(outcome(scorer, model, twins), outcome(scorer, model, twins, tokens=1))


@pytest.mark.parametrize("places", [1, 3])
def test_logits_in_chunks_are_as_all_at_once(model: Any, scorer: Scorer, places: int, monkeypatch: pytest.MonkeyPatch):
    whole = outcome(scorer, model)
    monkeypatch.setattr(scoring, "CHUNK_LOGITS", places * 64)
    assert_same(outcome(scorer, model), whole, 1e-6)


def test_gradient_checkpointing_changes_no_gradient():
    model = tuned_model("qwen3")
    scorer = Scorer(model)
    whole = outcome(scorer, model)
    with warnings.catch_warnings():  # transformers 5.23 has a new name for it, 5.19 has not
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    assert_same(outcome(scorer, model), whole, 1e-6)


def test_the_entropy_is_that_of_the_distribution_drawn_from(model: Any, scorer: Scorer):
    (pack,) = packs_of([EXAMPLES[2]], 99)
    plain = tuned_model("qwen3")
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor([EXAMPLES[2].rows[0].ids_T])).logits[0, len(PROMPT) - 1 : -1].double()
    expected = torch.distributions.Categorical(logits=logits / 0.7).entropy()
    torch.testing.assert_close(scorer.score(pack).entropy_N.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_lora_that_is_off_is_off(model: Any, scorer: Scorer):
    base = make_model("qwen3")
    with torch.no_grad(), model.disable_adapter():
        found = torch.cat([scorer.score(pack).logprob_N for pack in packs_of(EXAMPLES, 1 << 20)])
    torch.testing.assert_close(found.double(), expected_logprobs(base, EXAMPLES), atol=1e-5, rtol=1e-5)


def test_what_was_computed_is_counted(scorer: Scorer):
    (pack,) = packs_of(EXAMPLES, 1 << 20)
    prefixes = {
        each.ids_T[: t + 1]
        for example in EXAMPLES
        for each in example.rows
        for t in range(max(t for t, sampled in enumerate(each.sampled_T) if sampled))
    }
    assert scorer.score(pack).computed == pack.tokens == len(prefixes)
