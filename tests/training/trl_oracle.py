"""TRL's own GRPOTrainer as an oracle: recorded rows in, its loss and its gradient of every LoRA weight out.

One trainer on one tiny model serves all cases: what a case changes are attributes that TRL reads when it computes a
loss. Nothing is generated, no engine runs; `use_vllm` is set after construction, for without it TRL leaves out the
importance weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from art_patch.training import LossConfig
from tests.support.tiny import make_tiny_model


@dataclass(frozen=True)
class Rollout:
    """One row: a prompt, a completion of C tokens of which the model sampled some, and log-probabilities of those."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    sampled_C: tuple[bool, ...]
    old_C: tuple[float, ...]
    recorded_C: tuple[float, ...]
    reference_C: tuple[float, ...]
    advantage: float


class Oracle:
    """TRL's trainer, and the model it trains."""

    def __init__(self, directory: Path) -> None:
        """Build both once; `directory` takes the model's files."""
        from datasets import Dataset
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl.trainer.grpo_config import GRPOConfig
        from trl.trainer.grpo_trainer import GRPOTrainer

        base = make_tiny_model(directory / "base", hidden=32, vocab_size=320)
        model = AutoModelForCausalLM.from_pretrained(base)
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
        with torch.no_grad():  # B starts at zero; then A would have no gradient
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.normal_(0, 0.05)
        arguments = GRPOConfig(
            output_dir=str(directory / "out"),
            report_to=[],
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            per_device_train_batch_size=8,
            num_generations=4,
            disable_dropout=True,
            vllm_importance_sampling_mode="token_truncate",
        )
        self.trainer: Any = GRPOTrainer(
            model=model,
            args=arguments,
            processing_class=AutoTokenizer.from_pretrained(base),
            reward_funcs=self._rewards,
            train_dataset=Dataset.from_list([{"prompt": "x"}] * 8),
            rollout_func=self._rollouts,
        )
        self.model: Any = self.trainer.model
        self.trainer.current_gradient_accumulation_steps = 1  # set by the training loop that never runs
        self.rewards: list[float | None] = []
        self.rollouts: dict[str, list[Any]] = {}

    def _rewards(self, **_: Any) -> list[float | None]:
        return self.rewards

    def _rollouts(self, prompts: Any, trainer: Any) -> dict[str, list[Any]]:
        return self.rollouts

    def gradients(self) -> dict[str, torch.Tensor]:
        """Of every LoRA weight, and none are left."""
        found = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad(set_to_none=True)
        return found

    def loss(self, batch: dict[str, Any], config: LossConfig, loss_type: str | None = None) -> torch.Tensor:
        """TRL's loss of a batch under settings that say the same as `config`."""
        trainer, settings = self.trainer, config.settings
        trainer.loss_type = loss_type or {"gspo": "grpo"}.get(config.name, config.name)
        trainer.importance_sampling_level = config.ratio_level
        trainer.beta = config.kl_coefficient
        trainer.epsilon_low = settings.get("clip_low")
        trainer.epsilon_high = settings.get("clip_high", settings.get("ratio_cap"))
        trainer.args.delta = config.clip_max
        trainer.max_completion_length = settings.get("max_completion_tokens")
        trainer.off_policy_mask_threshold = config.off_policy_nats
        trainer.use_vllm = config.importance_cap is not None
        if not trainer.use_vllm:
            batch = {name: value for name, value in batch.items() if name != "importance_sampling_ratio"}
        self.model.train()  # in evaluation TRL divides by other numbers
        return trainer.compute_loss(self.model, batch)

    def batch(self, rollouts: Sequence[Rollout], config: LossConfig) -> dict[str, Any]:
        """Padded as TRL pads: prompts on the left, completions on the right."""
        b, p, c = len(rollouts), max(len(r.prompt) for r in rollouts), max(len(r.completion) for r in rollouts)
        out = {name: torch.zeros((b, p), dtype=torch.long) for name in ("prompt_ids", "prompt_mask")}
        out |= {name: torch.zeros((b, c), dtype=torch.long) for name in ("completion_ids", "completion_mask")}
        out["tool_mask"] = torch.ones((b, c), dtype=torch.long)
        columns = ("old_per_token_logps", "sampling_per_token_logps", "ref_per_token_logps")
        out |= {name: torch.zeros((b, c)) for name in columns}
        for i, row in enumerate(rollouts):
            length = len(row.completion)
            out["prompt_ids"][i, p - len(row.prompt) :] = torch.tensor(row.prompt)
            out["prompt_mask"][i, p - len(row.prompt) :] = 1
            out["completion_ids"][i, :length] = torch.tensor(row.completion)
            out["completion_mask"][i, :length] = 1
            out["tool_mask"][i, :length] = torch.tensor(row.sampled_C)
            for name, values in zip(columns, (row.old_C, row.recorded_C, row.reference_C), strict=True):
                out[name][i, :length] = torch.tensor(values)
        mask = out["completion_mask"] * out["tool_mask"]
        # What TRL computes where it generates; that this is what it computes there, another test shows.
        mismatch = (out["old_per_token_logps"] - out["sampling_per_token_logps"]) * mask
        return out | {
            "advantages": torch.tensor([row.advantage for row in rollouts]),
            "importance_sampling_ratio": mismatch.exp().clamp(max=config.importance_cap or 3.0),
            "num_items_in_batch": mask.sum(),
        }

    def score(self, rollouts: Sequence[Rollout], rewards: Sequence[float | None], scale: str, cap: float) -> Any:
        """TRL's own batch of these rollouts: its advantages, old log-probabilities and importance weights."""
        trainer = self.trainer
        trainer.scale_rewards = scale
        trainer.beta = 0.0
        trainer.use_vllm, trainer._last_loaded_step = True, trainer.state.global_step
        trainer.vllm_importance_sampling_clip_max = cap
        self.rewards = list(rewards)
        self.rollouts = {
            "prompt_ids": [list(row.prompt) for row in rollouts],
            "completion_ids": [list(row.completion) for row in rollouts],
            "logprobs": [list(row.recorded_C) for row in rollouts],
            "env_mask": [[int(sampled) for sampled in row.sampled_C] for row in rollouts],
        }
        self.model.train()
        return trainer._generate_and_score_completions([{"prompt": "x"}] * len(rollouts))


def make_oracle(directory: Path) -> Oracle:
    """An oracle, without the warnings of the code it is made of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Oracle(directory)
