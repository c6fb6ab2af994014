"""Parity with TRL: its SFT and DPO trainers and our losses on the same rows and the same tiny model, in fp32.

Our log-probabilities come from the plain way: each row alone, all logits. Tried with TRL 1.16.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from art_patch.training.losses import PreferenceInput, SftInput, preference_loss, sft_loss, sums_R

pytest.importorskip("trl", reason="TRL is not installed, so nothing is compared with it; pip install 'trl>=1.16,<2'")

ROWS = ((5, 6, 7, 20, 21, 22), (8, 9, 30, 31, 0, 0), (5, 6, 7, 40, 41, 0), (8, 9, 50, 0, 0, 0))
"""Two better rows and the two worse ones, padded by 0."""
MARKED = ((0, 0, 0, 1, 1, 1), (0, 0, 1, 1, 0, 0), (0, 0, 0, 1, 1, 0), (0, 0, 1, 0, 0, 0))
IDS_BT, MARKED_BT = torch.tensor(ROWS), torch.tensor(MARKED)
GIVEN_BT = (IDS_BT != 0).long()


def trainer(base: Path, directory: Path, kind: str, rows: list[dict[str, Any]]) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    config, make = {"sft": (SFTConfig, SFTTrainer), "dpo": (DPOConfig, DPOTrainer)}[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's settings are transformers' old names
        return make(
            model=AutoModelForCausalLM.from_pretrained(base),
            args=config(
                output_dir=str(directory), report_to=[], bf16=False, use_cpu=True, gradient_checkpointing=False
            ),
            processing_class=AutoTokenizer.from_pretrained(base),
            train_dataset=Dataset.from_list(rows),
        )


def logprobs(model: Any) -> tuple[Tensor, Tensor]:
    """Of every marked token, and its row."""
    found: list[Tensor] = []
    for ids_T, marked_T in zip(IDS_BT, MARKED_BT, strict=True):
        logprobs_TV = torch.log_softmax(model(input_ids=ids_T[None]).logits[0, :-1], -1)
        found.append(logprobs_TV.gather(1, ids_T[1:, None]).squeeze(1)[marked_T[1:].bool()])
    return torch.cat(found), torch.arange(4).repeat_interleave(MARKED_BT.sum(1))


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def compare(model: Any, expected: Tensor, own: Tensor) -> None:
    expected.backward()
    theirs = gradients(model)
    own.backward()
    ours = gradients(model)
    assert own.item() == pytest.approx(expected.item(), abs=1e-6)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, atol=1e-6, rtol=1e-5)


def test_imitation_is_trls(base: Path, tmp_path: Path):
    trl = trainer(base, tmp_path, "sft", [{"prompt": "x", "completion": "y"}])
    trl.model.train()
    inputs = {
        "input_ids": IDS_BT,
        "attention_mask": GIVEN_BT,
        "labels": IDS_BT.masked_fill(MARKED_BT == 0, -100),
    }
    tokens = int(MARKED_BT.sum())
    expected = trl.compute_loss(trl.model, inputs, num_items_in_batch=torch.tensor(tokens))
    logprob_N, _ = logprobs(trl.model)
    compare(trl.model, expected, sft_loss(SftInput(logprob_N, tokens))[0])


def test_preference_is_trls(base: Path, tmp_path: Path):
    trl = trainer(base, tmp_path, "dpo", [{"prompt": "x", "chosen": "y", "rejected": "z"}])
    trl.model.train()
    logprob_N, row_N = logprobs(trl.model)
    better, worse = sums_R(logprob_N, row_N, 4).chunk(2)
    reference, reference_worse = better.detach() - torch.tensor([1.0, -2.0]), worse.detach() + torch.tensor([3.0, 0.5])
    trl.precompute_ref_logps = True
    inputs = {
        "input_ids": IDS_BT,
        "attention_mask": GIVEN_BT,
        "completion_mask": MARKED_BT,
        "ref_chosen_logps": reference,
        "ref_rejected_logps": reference_worse,
    }
    expected = trl.compute_loss(trl.model, inputs)
    own, metrics = preference_loss(PreferenceInput(better, worse, reference, reference_worse, trl.beta, 2))
    compare(trl.model, expected, own)
    assert metrics.margin / 2 == pytest.approx(trl._metrics["train"]["rewards/margins"][-1], abs=1e-5)
    assert metrics.right / 2 == trl._metrics["train"]["rewards/accuracies"][-1]
